"""Language identification on sentences that were written for this test: ten everyday sentences in each of 24 languages."""

from __future__ import annotations

import pytest

from regard.text.language_identification import DirectionDetector, identify_language, identify_languages

SAMPLES = {
    "en": """The train to the airport leaves every twenty minutes.
My sister bought a second-hand bicycle last week.
Could you tell me where the nearest pharmacy is?
We should water the plants before it gets too hot.
He forgot his umbrella and came home soaking wet.
I would rather stay in and read a book tonight.
The meeting was moved to Thursday afternoon.
Please turn off the lights when you leave.
There is still some soup left in the fridge.
Nobody knew how to fix the old washing machine.""",
    "de": """Der Zug zum Flughafen fährt alle zwanzig Minuten.
Meine Schwester hat letzte Woche ein gebrauchtes Fahrrad gekauft.
Können Sie mir sagen, wo die nächste Apotheke ist?
Wir sollten die Pflanzen gießen, bevor es zu heiß wird.
Er hat seinen Regenschirm vergessen und kam ganz nass nach Hause.
Heute Abend bleibe ich lieber zu Hause und lese.
Die Besprechung wurde auf Donnerstag verschoben.
Bitte machen Sie das Licht aus, wenn Sie gehen.
Im Kühlschrank ist noch etwas Suppe.
Niemand wusste, wie man die alte Waschmaschine repariert.""",
    "fr": """Le train pour l'aéroport part toutes les vingt minutes.
Ma sœur a acheté un vélo d'occasion la semaine dernière.
Pourriez-vous me dire où se trouve la pharmacie la plus proche ?
Nous devrions arroser les plantes avant qu'il ne fasse trop chaud.
Il a oublié son parapluie et il est rentré trempé.
Ce soir, je préfère rester à la maison et lire.
La réunion a été reportée à jeudi après-midi.
Éteignez la lumière en partant, s'il vous plaît.
Il reste un peu de soupe dans le réfrigérateur.
Personne ne savait réparer la vieille machine à laver.""",
    "zh": """去机场的火车每二十分钟一班。
我姐姐上个星期买了一辆二手自行车。
请问最近的药店在哪里？
天气太热之前我们应该给花浇水。
他忘了带伞，回家的时候全身都湿了。
今天晚上我想待在家里看书。
会议改到了星期四下午。
离开的时候请关灯。
冰箱里还有一点汤。
沒有人知道怎麼修那台舊洗衣機。""",
    "es": """El tren al aeropuerto sale cada veinte minutos.
Mi hermana compró una bicicleta usada la semana pasada.
¿Podría decirme dónde está la farmacia más cercana?
Deberíamos regar las plantas antes de que haga demasiado calor.
Se olvidó el paraguas y llegó a casa empapado.
Esta noche prefiero quedarme en casa y leer un libro.
La reunión se ha aplazado hasta el jueves por la tarde.
Por favor, apaguen las luces al salir.
Todavía queda un poco de sopa en la nevera.
Nadie sabía cómo arreglar la vieja lavadora.""",
    "it": """Il treno per l'aeroporto parte ogni venti minuti.
Mia sorella ha comprato una bicicletta usata la settimana scorsa.
Può dirmi dove si trova la farmacia più vicina?
Dovremmo annaffiare le piante prima che faccia troppo caldo.
Ha dimenticato l'ombrello ed è tornato a casa fradicio.
Stasera preferisco restare a casa a leggere un libro.
La riunione è stata spostata a giovedì pomeriggio.
Spegnete la luce quando uscite, per favore.
C'è ancora un po' di minestra nel frigorifero.
Nessuno sapeva come riparare la vecchia lavatrice.""",
    "pt": """O comboio para o aeroporto parte de vinte em vinte minutos.
A minha irmã comprou uma bicicleta usada na semana passada.
Pode dizer-me onde fica a farmácia mais próxima?
Devíamos regar as plantas antes que fique muito calor.
Ele esqueceu o guarda-chuva e chegou a casa encharcado.
Hoje à noite prefiro ficar em casa e ler um livro.
A reunião foi adiada para quinta-feira à tarde.
Por favor, apaguem as luzes quando saírem.
Ainda há um pouco de sopa na geladeira.
Ninguém sabia como consertar a velha máquina de lavar.""",
    "nl": """De trein naar het vliegveld vertrekt om de twintig minuten.
Mijn zus heeft vorige week een tweedehands fiets gekocht.
Kunt u mij vertellen waar de dichtstbijzijnde apotheek is?
We moeten de planten water geven voordat het te warm wordt.
Hij was zijn paraplu vergeten en kwam doornat thuis.
Vanavond blijf ik liever thuis om een boek te lezen.
De vergadering is naar donderdagmiddag verplaatst.
Doe alstublieft het licht uit als u weggaat.
Er staat nog wat soep in de koelkast.
Niemand wist hoe je de oude wasmachine moest repareren.""",
    "sv": """Tåget till flygplatsen går var tjugonde minut.
Min syster köpte en begagnad cykel förra veckan.
Kan du säga mig var närmaste apotek ligger?
Vi borde vattna blommorna innan det blir för varmt.
Han glömde sitt paraply och kom hem genomblöt.
Ikväll stannar jag hellre hemma och läser en bok.
Mötet har flyttats till torsdag eftermiddag.
Var snäll och släck lampan när du går.
Det finns fortfarande lite soppa kvar i kylskåpet.
Ingen visste hur man lagar den gamla tvättmaskinen.""",
    "da": """Toget til lufthavnen kører hvert tyvende minut.
Min søster købte en brugt cykel i sidste uge.
Kan du sige mig, hvor det nærmeste apotek ligger?
Vi burde vande planterne, inden det bliver for varmt.
Han glemte sin paraply og kom gennemblødt hjem.
I aften vil jeg hellere blive hjemme og læse en bog.
Mødet er blevet flyttet til torsdag eftermiddag.
Vær venlig at slukke lyset, når du går.
Der er stadig lidt suppe tilbage i køleskabet.
Ingen vidste, hvordan man reparerer den gamle vaskemaskine.""",
    "pl": """Pociąg na lotnisko odjeżdża co dwadzieścia minut.
Moja siostra kupiła w zeszłym tygodniu używany rower.
Czy może mi pan powiedzieć, gdzie jest najbliższa apteka?
Powinniśmy podlać rośliny, zanim zrobi się za gorąco.
Zapomniał parasola i wrócił do domu cały mokry.
Dziś wieczorem wolę zostać w domu i poczytać książkę.
Spotkanie zostało przełożone na czwartek po południu.
Proszę zgasić światło, kiedy będziecie wychodzić.
W lodówce zostało jeszcze trochę zupy.
Nikt nie wiedział, jak naprawić starą pralkę.""",
    "cs": """Vlak na letiště odjíždí každých dvacet minut.
Moje sestra si minulý týden koupila použité kolo.
Můžete mi říct, kde je nejbližší lékárna?
Měli bychom zalít květiny, než bude příliš horko.
Zapomněl si deštník a přišel domů úplně mokrý.
Dnes večer raději zůstanu doma a budu číst.
Schůzka byla přesunuta na čtvrtek odpoledne.
Až budete odcházet, zhasněte prosím světlo.
V lednici zbylo ještě trochu polévky.
Nikdo nevěděl, jak opravit starou pračku.""",
    "hu": """A repülőtérre húszpercenként indul vonat.
A nővérem a múlt héten vett egy használt biciklit.
Meg tudná mondani, hol van a legközelebbi gyógyszertár?
Meg kellene locsolni a növényeket, mielőtt túl meleg lesz.
Otthon felejtette az esernyőjét, és bőrig ázva ért haza.
Ma este inkább otthon maradok és olvasok.
A megbeszélést csütörtök délutánra halasztották.
Kérem, kapcsolják le a villanyt, amikor elmennek.
Maradt még egy kis leves a hűtőben.
Senki sem tudta, hogyan kell megjavítani a régi mosógépet.""",
    "ro": """Trenul spre aeroport pleacă la fiecare douăzeci de minute.
Sora mea și-a cumpărat săptămâna trecută o bicicletă veche.
Îmi puteți spune unde este cea mai apropiată farmacie?
Ar trebui să udăm plantele înainte să se facă prea cald.
Și-a uitat umbrela și a ajuns acasă ud leoarcă.
În seara asta prefer să stau acasă și să citesc o carte.
Întâlnirea a fost mutată joi după-amiază.
Vă rog să stingeți lumina când plecați.
A mai rămas puțină supă în frigider.
Nimeni nu știa cum să repare vechea mașină de spălat.""",
    "fi": """Juna lentokentälle lähtee kahdenkymmenen minuutin välein.
Siskoni osti viime viikolla käytetyn polkupyörän.
Voisitteko kertoa, missä on lähin apteekki?
Meidän pitäisi kastella kasvit ennen kuin tulee liian kuuma.
Hän unohti sateenvarjonsa ja tuli kotiin läpimärkänä.
Tänä iltana jään mieluummin kotiin lukemaan kirjaa.
Kokous siirrettiin torstai-iltapäivään.
Sammuttakaa valot, kun lähdette.
Jääkaapissa on vielä vähän keittoa.
Kukaan ei osannut korjata vanhaa pesukonetta.""",
    "tr": """Havaalanına giden tren her yirmi dakikada bir kalkıyor.
Kız kardeşim geçen hafta ikinci el bir bisiklet aldı.
En yakın eczanenin nerede olduğunu söyler misiniz?
Hava çok ısınmadan bitkileri sulamamız gerekiyor.
Şemsiyesini unuttu ve eve sırılsıklam geldi.
Bu akşam evde kalıp kitap okumayı tercih ederim.
Toplantı perşembe öğleden sonraya ertelendi.
Çıkarken lütfen ışıkları kapatın.
Buzdolabında hâlâ biraz çorba var.
Kimse eski çamaşır makinesini nasıl tamir edeceğini bilmiyordu.""",
    "ca": """El tren cap a l'aeroport surt cada vint minuts.
La meva germana es va comprar una bicicleta usada la setmana passada.
Em podria dir on és la farmàcia més propera?
Hauríem de regar les plantes abans que faci massa calor.
Es va oblidar el paraigua i va arribar a casa ben xop.
Aquest vespre m'estimo més quedar-me a casa i llegir.
La reunió s'ha ajornat fins dijous a la tarda.
Apagueu els llums quan marxeu, si us plau.
Encara queda una mica de sopa a la nevera.
Ningú no sabia com arreglar la rentadora vella.""",
    "id": """Kereta ke bandara berangkat setiap dua puluh menit.
Kakak perempuan saya membeli sepeda bekas minggu lalu.
Bisakah Anda memberi tahu saya di mana apotek terdekat?
Kita harus menyiram tanaman sebelum cuaca terlalu panas.
Dia lupa membawa payung dan pulang basah kuyup.
Malam ini saya lebih suka tinggal di rumah dan membaca buku.
Rapat itu diundur sampai Kamis sore.
Tolong matikan lampu kalau Anda pergi.
Masih ada sedikit sup di dalam kulkas.
Tidak ada yang tahu cara memperbaiki mesin cuci tua itu.""",
    "vi": """Tàu ra sân bay chạy hai mươi phút một chuyến.
Tuần trước chị tôi đã mua một chiếc xe đạp cũ.
Anh có thể cho tôi biết hiệu thuốc gần nhất ở đâu không?
Chúng ta nên tưới cây trước khi trời quá nóng.
Anh ấy quên mang ô và về nhà ướt sũng.
Tối nay tôi muốn ở nhà đọc sách hơn.
Cuộc họp đã được dời sang chiều thứ Năm.
Xin hãy tắt đèn khi ra về.
Trong tủ lạnh vẫn còn một ít canh.
Không ai biết cách sửa chiếc máy giặt cũ.""",
    "ru": """Поезд в аэропорт отправляется каждые двадцать минут.
Моя сестра на прошлой неделе купила подержанный велосипед.
Скажите, пожалуйста, где ближайшая аптека?
Надо полить цветы, пока не стало слишком жарко.
Он забыл зонтик и пришёл домой насквозь мокрый.
Сегодня вечером я лучше останусь дома и почитаю.
Встречу перенесли на четверг после обеда.
Пожалуйста, выключайте свет, когда уходите.
В холодильнике ещё осталось немного супа.
Никто не знал, как починить старую стиральную машину.""",
    "uk": """Потяг до аеропорту вирушає кожні двадцять хвилин.
Минулого тижня моя сестра купила вживаний велосипед.
Скажіть, будь ласка, де найближча аптека?
Треба полити квіти, поки не стало надто спекотно.
Він забув парасольку і прийшов додому геть мокрий.
Сьогодні ввечері я краще залишуся вдома і почитаю.
Зустріч перенесли на четвер після обіду.
Будь ласка, вимикайте світло, коли йдете.
У холодильнику ще залишилося трохи супу.
Ніхто не знав, як полагодити стару пральну машину.""",
    "el": """Το τρένο για το αεροδρόμιο φεύγει κάθε είκοσι λεπτά.
Η αδελφή μου αγόρασε ένα μεταχειρισμένο ποδήλατο.
Μπορείτε να μου πείτε πού είναι το κοντινότερο φαρμακείο;
Πρέπει να ποτίσουμε τα φυτά πριν ζεστάνει πολύ.
Ξέχασε την ομπρέλα του και γύρισε μούσκεμα.
Απόψε προτιμώ να μείνω στο σπίτι και να διαβάσω.
Η συνάντηση αναβλήθηκε για την Πέμπτη το απόγευμα.
Σβήστε τα φώτα όταν φύγετε, παρακαλώ.
Έχει μείνει λίγη σούπα στο ψυγείο.
Κανείς δεν ήξερε πώς να φτιάξει το παλιό πλυντήριο.""",
    "ja": """空港行きの電車は二十分ごとに出ています。
妹は先週、中古の自転車を買いました。
一番近い薬局はどこか教えてください。
暑くなりすぎる前に植物に水をやりましょう。
彼は傘を忘れて、ずぶぬれで帰ってきた。
今夜は家で本を読んでいたいです。
会議は木曜日の午後に変更されました。
帰るときは電気を消してください。
冷蔵庫にまだスープが少し残っている。
古い洗濯機の直し方を誰も知らなかった。""",
    "ar": """القطار إلى المطار يغادر كل عشرين دقيقة.
اشترت أختي دراجة مستعملة الأسبوع الماضي.
هل يمكنك أن تخبرني أين أقرب صيدلية؟
يجب أن نسقي النباتات قبل أن يشتد الحر.
نسي مظلته وعاد إلى البيت مبللا تماما.
أفضل الليلة أن أبقى في البيت وأقرأ كتابا.
تم تأجيل الاجتماع إلى بعد ظهر يوم الخميس.
أطفئوا الأنوار من فضلكم عندما تغادرون.
لا يزال هناك قليل من الحساء في الثلاجة.
لم يعرف أحد كيف يصلح الغسالة القديمة.""",
}
OWN = ("en", "de", "fr", "zh")
SENTENCES = {language: text.splitlines() for language, text in SAMPLES.items()}
DETECTOR = DirectionDetector([f"{a}>{b}" for x in ("de", "fr", "zh", "zh-Hant") for a, b in (("en", x), (x, "en"))], {})


@pytest.mark.parametrize("language", SENTENCES)
def test_sentences_are_identified(language: str) -> None:
    assert len(SENTENCES[language]) == 10
    right = sum(found.language == language for found in identify_languages(SENTENCES[language]))
    assert right >= (10 if language in OWN else 9)


def test_nearly_all_sentences_are_identified() -> None:
    pairs = [(language, text) for language, texts in SENTENCES.items() for text in texts]
    right = [identify_language(text).language == language for language, text in pairs]
    assert sum(right) >= 0.97 * len(pairs)


@pytest.mark.parametrize("language", OWN)
@pytest.mark.parametrize("to", [None, "en"])
def test_sentences_in_the_languages_of_the_model_are_translated(language: str, to: str | None) -> None:
    if to != language:
        found = [DETECTOR.detect([text], to, None)[0].source.split("-")[0] for text in SENTENCES[language]]
        assert found == [language] * 10


@pytest.mark.parametrize("language", [language for language in SENTENCES if language not in OWN])
@pytest.mark.parametrize("to", [None, "de"])
def test_sentences_in_other_languages_are_left(language: str, to: str | None) -> None:
    left = [text for text in SENTENCES[language] if not DETECTOR.detect([text], to, None)[0].source]
    assert len(left) == 10


def test_short_words_are_uncertain() -> None:
    words = {word for texts in SENTENCES.values() for text in texts for word in text.split() if len(word) < 10}
    assert len(words) > 800
    spaced = [word for word in words if not any(char >= "\u3000" for char in word)]
    assert not any(identify_language(word).is_certain for word in spaced)


def test_most_sentences_are_certain() -> None:
    found = [identify_language(text) for texts in SENTENCES.values() for text in texts]
    assert sum(each.is_certain for each in found) >= 0.85 * len(found)

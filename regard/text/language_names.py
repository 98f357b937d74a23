"""Names and codes of languages: "german", "Deutsch", "deu", "ger" and "de-AT" all mean de.

A language has the code of ISO 639-1, or of ISO 639-3 where it has none there. Chinese has two, by its script: zh is
simplified Chinese, zh-Hant is traditional Chinese.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Sequence
from functools import cache

# code | English name | other names, and codes of ISO 639-2 and 639-3
TABLE = """
af|Afrikaans|afr
am|Amharic|amh, አማርኛ
ar|Arabic|ara, العربية, arabisch, arabe
as|Assamese|asm
ast|Asturian|asturianu
az|Azerbaijani|aze, azərbaycan, azeri
be|Belarusian|bel, беларуская
bg|Bulgarian|bul, български
bn|Bengali|ben, bangla, বাংলা
bo|Tibetan|bod, tib
br|Breton|bre, brezhoneg
brx|Bodo|boro
bs|Bosnian|bos, bosanski
ca|Catalan|cat, català, valencian
ckb|Central Kurdish|sorani
cs|Czech|ces, cze, čeština, tschechisch, tchèque
csb|Kashubian|kaszëbsczi
cy|Welsh|cym, wel, cymraeg
da|Danish|dan, dansk, dänisch, danois
de|German|deu, ger, deutsch, allemand, 德语, 德語, 德文
doi|Dogri|
dv|Dhivehi|div
el|Greek|ell, gre, ελληνικά, griechisch, grec
en|English|eng, englisch, anglais, 英语, 英語, 英文
eo|Esperanto|epo
es|Spanish|spa, español, castellano, castilian, spanisch, espagnol, 西班牙语
et|Estonian|est, eesti
eu|Basque|eus, baq, euskara
fa|Persian|fas, per, farsi, فارسی
fi|Finnish|fin, suomi, finnisch, finnois
fo|Faroese|fao, føroyskt
fr|French|fra, fre, français, französisch, 法语, 法語, 法文
fur|Friulian|furlan
fy|Western Frisian|fry, frisian, frysk
ga|Irish|gle, gaeilge
gd|Scottish Gaelic|gla, gàidhlig
gl|Galician|glg, galego
gu|Gujarati|guj
ha|Hausa|hau
he|Hebrew|heb, iw, עברית
hi|Hindi|hin, हिन्दी
hr|Croatian|hrv, hrvatski, serbo-croatian, sh, hbs
hsb|Upper Sorbian|hornjoserbšćina
ht|Haitian Creole|hat, kreyòl
hu|Hungarian|hun, magyar, ungarisch, hongrois
hy|Armenian|hye, arm
id|Indonesian|ind, bahasa indonesia
ig|Igbo|ibo
is|Icelandic|isl, ice, íslenska
it|Italian|ita, italiano, italienisch, italien, 意大利语
ja|Japanese|jpn, 日本語, japanisch, japonais, 日语
jv|Javanese|jav
ka|Georgian|kat, geo
kab|Kabyle|taqbaylit
kk|Kazakh|kaz
km|Khmer|khm
kn|Kannada|kan
ko|Korean|kor, 한국어, koreanisch, coréen, 韩语
kok|Konkani|
ks|Kashmiri|kas
ku|Kurdish|kur, kmr, kurmanji, kurdî
ky|Kyrgyz|kir
la|Latin|lat, latina
lb|Luxembourgish|ltz, lëtzebuergesch
li|Limburgish|lim
ln|Lingala|lin
lo|Lao|
lt|Lithuanian|lit, lietuvių
lv|Latvian|lav, latviešu
mai|Maithili|
mg|Malagasy|mlg
mk|Macedonian|mkd, mac, македонски
ml|Malayalam|mal
mn|Mongolian|mon
mni|Manipuri|meitei
mr|Marathi|mar
ms|Malay|msa, may, bahasa melayu
mt|Maltese|mlt, malti
my|Burmese|mya, bur
nb|Norwegian|nob, nno, nor, no, nn, norsk, bokmål, nynorsk, norwegisch, norvégien
nds|Low German|plattdüütsch
ne|Nepali|nep
nl|Dutch|nld, dut, nederlands, flemish, niederländisch, néerlandais, 荷兰语
nso|Northern Sotho|pedi
oc|Occitan|oci
or|Odia|ori, oriya
pa|Punjabi|pan
pl|Polish|pol, polski, polnisch, polonais
ps|Pashto|pus
pt|Portuguese|por, português, brazilian, portugiesisch, portugais, 葡萄牙语
ro|Romanian|ron, rum, română, rumänisch, roumain
ru|Russian|rus, русский, russisch, russe, 俄语
rw|Kinyarwanda|kin
sd|Sindhi|snd
se|Northern Sami|sme
si|Sinhala|sin
sk|Slovak|slk, slo, slovenčina, slowakisch, slovaque
sl|Slovenian|slv, slovenščina, slowenisch, slovène
so|Somali|som
sq|Albanian|sqi, alb, shqip
sr|Serbian|srp, српски
sv|Swedish|swe, svenska, schwedisch, suédois
sw|Swahili|swa, kiswahili
ta|Tamil|tam
te|Telugu|tel
tg|Tajik|tgk
th|Thai|tha, ไทย
tk|Turkmen|tuk
tl|Filipino|tgl, fil, tagalog
tr|Turkish|tur, türkçe, türkisch, turc
tt|Tatar|tat
ug|Uyghur|uig
uk|Ukrainian|ukr, українська, ukrainisch, ukrainien
ur|Urdu|urd
uz|Uzbek|uzb
vi|Vietnamese|vie, tiếng việt, vietnamesisch, vietnamien
wa|Walloon|wln, walon
xh|Xhosa|xho
yi|Yiddish|yid, ydd
yo|Yoruba|yor
zh|Chinese|zho, chi, cmn, zh-hans, mandarin, simplified chinese, chinesisch, chinois, 中文, 汉语, 简体中文, 普通话
zh-Hant|traditional Chinese|zh-tw, zh-hk, zh-mo, zht, 繁體中文, 繁体中文, 漢語, 正體中文
zu|Zulu|zul
"""


def fold_name(name: str) -> str:
    """Return a name in lower case, its words sorted, without accents and punctuation: "Chinese (Traditional)"."""
    name = unicodedata.normalize("NFKD", name.casefold().replace("_", "-"))
    words = re.findall(r"[^\W_]+(?:-[^\W_]+)*", "".join(char for char in name if not unicodedata.combining(char)))
    return " ".join(sorted(words))


@cache
def read_table() -> tuple[dict[str, str], dict[str, str]]:
    """Return the English name of each code, and the code of each folded name or code."""
    names: dict[str, str] = {}
    codes: dict[str, str] = {}
    for line in TABLE.strip().splitlines():
        code, english, others = line.split("|")
        names[code] = english
        codes |= {fold_name(name): code for name in (code, english, *others.split(", ")) if name}
    return names, codes


def language_name(code: str) -> str:
    """Return the English name of a language, or the code itself where it has none here."""
    return read_table()[0].get(standard_code(code), code)


def standard_code(name: str) -> str:
    """Return the code of a language by any of its names or codes, with or without a region; else the name as it is."""
    codes, folded = read_table()[1], fold_name(name.split(".")[0])
    parts = folded.split("-")
    if parts[0] in ("zh", "zho", "chi", "cmn") and {"hant", "tw", "hk", "mo"} & set(parts):
        return "zh-Hant"
    return codes.get(folded) or codes.get(parts[0] if len(parts) > 1 else folded) or name


def find_language(name: str, known: Sequence[str]) -> str | None:
    """Return the one of the `known` codes that a name or code means, or None.

    >>> find_language("Deutsch", ["en", "de"]), find_language("zh-TW", ["zh", "zh-Hant"])
    ('de', 'zh-Hant')
    """
    for code in known:
        if code.casefold() == name.strip().casefold().replace("_", "-"):
            return code
    wanted = standard_code(name)
    for code in known:
        if standard_code(code) == wanted:
            return code
    chinese = [code for code in known if standard_code(code).startswith("zh")]
    return chinese[0] if wanted == "zh" and chinese else None


def suggest_language(name: str, known: Sequence[str]) -> str | None:
    """Return the one of the `known` codes whose name is spelled most nearly like a name that no language has, or None."""
    own = {standard_code(code): code for code in known}
    spellings = {spelling: own[code] for spelling, code in read_table()[1].items() if code in own and len(spelling) > 3}
    nearest = difflib.get_close_matches(fold_name(name), spellings, n=1, cutoff=0.7)
    return spellings[nearest[0]] if nearest else None

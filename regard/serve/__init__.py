"""A server for models: a web page, and the HTTP APIs that existing clients of LibreTranslate, OpenAI and others speak.

Requests are read and answered by a web application (`app.py`). Inference runs in threads beside the event loop
(`blocking_calls.py`) and calls what `regard.load` returns (`model_store.py`). Its decoding goes through a scheduler
(`scheduler.py`), which decodes the sequences of all requests together (`decoding_workers.py`).
"""

# Regard on a CPU. Build and use:
#   docker build -t regard .
#   docker run --rm regard translate "I ate an apple."
#   docker run --rm -v "$PWD:/work" regard train toy-en-de
#   docker run --rm -p 127.0.0.1:8000:8000 regard serve --host 0.0.0.0
# constraints.txt pins torch. Where the package index offers only CUDA builds of it, pass an index of CPU builds:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t regard .
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /opt/regard
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY regard ./regard
RUN pip install --no-cache-dir --constraint constraints.txt ".[serve]"

# Runs, pages and pictures are written into the folder that is mounted here.
WORKDIR /work
ENV REGARD_CACHE=/work/.regard-cache
ENTRYPOINT ["regard"]
CMD ["--help"]

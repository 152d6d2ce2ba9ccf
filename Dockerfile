# The environment of the Makefile in an image: all versions are in requirements.txt and requirements.lock.
#   docker build -t trainval . && docker run --rm -it trainval python trainval.py --list
# For a machine without GPUs: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes it much smaller.
FROM python:3.11-slim-bookworm AS system
# Debian's mirrors delete old versions of packages, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*

FROM system
ARG PIP_EXTRA_INDEX_URL
WORKDIR /trainval
COPY Makefile requirements.txt requirements.lock ./
RUN make run-environment
COPY . .
ENV PATH=/trainval/.venv/bin:$PATH
CMD ["bash"]

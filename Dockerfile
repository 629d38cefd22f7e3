# The README's two commands in a container:
#
#     docker build -t comlrl .
#     docker run --rm -v "$PWD/outputs:/comlrl/outputs" comlrl    # make quickstart
#     docker run --rm comlrl make test
#
# GPUs: `docker run --gpus all …`. Without the CUDA libraries, for CPUs:
# `docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t comlrl .`
FROM python:3.12-slim

# Debian keeps no older versions to pin. The sandbox is best with bubblewrap.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap make \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1
WORKDIR /comlrl

# Its own layer for what is largest and changes least; `make setup` keeps it.
ARG TORCH_INDEX=https://pypi.org/simple
COPY constraints.txt .
RUN python3 -m venv .venv \
    && .venv/bin/pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" torch

COPY . .
RUN make setup

CMD ["make", "quickstart"]

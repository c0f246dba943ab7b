# draftforge and what it runs on, for one machine with or without NVIDIA GPUs:
#   docker build -t draftforge .
#   docker run --rm --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD:/data" draftforge distill recipe.yaml
# torch is the build of the index that pip is given, with CUDA by default; PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name
# others. They stay in the history of the stage that builds, which is not part of the image.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=2.13.0
ARG EXTRAS=cuda,deepspeed,postgres,tensorboard,wandb
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/venv/bin:$PATH
# torch alone first: a change of the sources leaves this layer as it is.
RUN python -m venv /venv && pip install --no-cache-dir "torch==${TORCH}"
COPY . /src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "torch==${TORCH}" "/src[${EXTRAS}]"

FROM ${BASE}
# Triton compiles what launches its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --home-dir /data --create-home draftforge
COPY --from=build /venv /venv
# Caches go into the mounted folder, also for a --user whom the image does not know.
ENV PATH=/venv/bin:$PATH HOME=/data USER=draftforge
USER 1000
WORKDIR /data
ENTRYPOINT ["draftforge"]
CMD ["--help"]

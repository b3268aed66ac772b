# Slipstream on NVIDIA GPUs: Megatron trainer and SGLang servers. Build: docker build -f docker/gpu.Dockerfile -t slipstream:gpu .
# The compiler of CUDA is needed: SGLang and TransformerEngine build kernels on first use.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends \
    build-essential git iproute2 libibverbs1 libnuma1 openssh-client python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN python3.12 -m venv /opt/venv && python -m pip install --no-cache-dir --upgrade pip wheel setuptools

WORKDIR /opt/slipstream
# Before the rest: TransformerEngine compiles its binding against the installed torch.
RUN python -m pip install --no-cache-dir "torch==2.11.0"
COPY . .
RUN python -m pip install --no-cache-dir --no-build-isolation -e '.[gpu,wandb,mlflow]'
RUN python -m core.quickstart --help && python -c "import slipstream, ray, torch, megatron.core, sglang"

# Slipstream on CPUs: trainer and embedded generators, tests and tools. Build: docker build -f docker/cpu.Dockerfile -t slipstream:cpu .
FROM python:3.11-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends build-essential git iproute2 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
# The CPU build of torch: 0.2 GB instead of several with the CUDA libraries.
RUN python -m pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<=2.13.0"
COPY . .
RUN python -m pip install --no-cache-dir -e '.[wandb,mlflow]'
RUN python -m core.quickstart --help && python -c "import slipstream, ray, torch, megatron.core"

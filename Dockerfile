# Nano-vLLM's server in a container, installed by scripts/setup.sh as on any other machine:
#
#   docker build --target cpu --tag nano-vllm:cpu .
#   docker build --target cuda --tag nano-vllm:cuda .
#
# docs/serving.md says how to run them. Both start from the same image: torch's wheels bring the CUDA libraries, and an
# image with CUDA would hold them a second time. The driver comes from the host (NVIDIA Container Toolkit).

FROM python:3.12-slim AS base
# A C compiler: the kernels of the CPU and Triton's launchers are compiled on first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# /cache keeps models and compiled kernels. A new volume takes the owner of the folder that it covers.
RUN useradd --create-home --uid 1000 nanovllm && install -d -o nanovllm -g nanovllm /opt/nano-vllm /cache
USER nanovllm
WORKDIR /opt/nano-vllm
ENV NANOVLLM_CACHE=/cache/nanovllm HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
VOLUME /cache
EXPOSE 8000
# The start period covers the download of a model. Inside the container the port is always 8000; publish another one.
HEALTHCHECK --start-period=10m --interval=30s --timeout=10s CMD ["/opt/nano-vllm/.venv/bin/python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["/opt/nano-vllm/scripts/container.sh"]
CMD ["serve", "smollm2"]
# Only what the installation reads. It is an editable one, so the rest of the package can follow in a later layer, and
# a change of the code does not install torch again.
COPY --chown=nanovllm pyproject.toml README.md LICENSE ./
COPY --chown=nanovllm scripts/setup.sh scripts/
COPY --chown=nanovllm nanovllm/__init__.py nanovllm/

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN bash -c 'source scripts/setup.sh && ensure_installed server,gpu'
COPY --chown=nanovllm scripts scripts
COPY --chown=nanovllm nanovllm nanovllm

FROM base AS cpu
# torch of PyPI has CUDA in it. Of the same version with and without "+cpu", pip takes the one with it.
RUN PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    bash -c 'source scripts/setup.sh && ensure_installed server'
COPY --chown=nanovllm scripts scripts
COPY --chown=nanovllm nanovllm nanovllm

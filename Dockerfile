# ingot on a CPU. With CUDA: docker build --build-arg TORCH_INDEX=https://pypi.org/simple -t ingot .
FROM python:3.12-slim

# ingot builds its C++ kernels for the CPU that it runs on, when it first needs them.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt pyproject.toml README.md LICENSE NOTICE /opt/ingot/
COPY src /opt/ingot/src
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" --constraint /opt/ingot/constraints.txt /opt/ingot \
    && rm -rf /opt/ingot

RUN useradd --create-home --uid 1000 ingot
USER ingot
WORKDIR /work
ENTRYPOINT ["ingot"]
CMD ["--help"]

# docker build -t labkit .                  the small image, with torch for CPUs
# docker build -t labkit:gpu --target gpu . the large one, with torch for CUDA
# docker run --rm -p 127.0.0.1:8888:8888 labkit
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY labkit labkit
COPY notebooks notebooks
COPY exercises exercises
COPY solutions solutions
COPY benchmarks/launch.py benchmarks/machine.py benchmarks/
RUN useradd --create-home --home-dir /learner --uid 1000 learner
EXPOSE 8888
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8888/api', timeout=4)"]

FROM base AS gpu
RUN pip install --constraint constraints.txt '.[lab]'
USER 1000
ENV LABKIT_HOME=/learner/labkit
WORKDIR /learner
CMD ["sh", "-c", "labkit lab --copy \"$LABKIT_HOME\" && exec jupyter lab --ip=0.0.0.0 --no-browser"]

FROM base AS cpu
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt '.[lab]'
USER 1000
ENV LABKIT_HOME=/learner/labkit
WORKDIR /learner
CMD ["sh", "-c", "labkit lab --copy \"$LABKIT_HOME\" && exec jupyter lab --ip=0.0.0.0 --no-browser"]

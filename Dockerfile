# taut with everything that its commands need, in a container. On a CPU:
#
#     docker build --tag taut .
#
# On CUDA, the build of torch that a package index has for Linux, which brings CUDA's libraries along; the host needs the
# driver and the NVIDIA container toolkit:
#
#     docker build --tag taut --build-arg TORCH=torch==2.13.0 .
#
# docs/install.md says how to run it.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM python:${PYTHON}-slim-bookworm
# torch.compile and Triton build kernels with the compiler; the sandbox filters system calls with libseccomp.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libseccomp2 \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir ${TORCH}
ARG EXTRAS=train,data,gguf,compressed,gym,mcp,quant,ray,lm-eval,s3,tensorboard,video,rl
COPY --from=wheel /wheel /wheel
COPY constraints.txt /wheel/
RUN pip install --no-cache-dir --constraint /wheel/constraints.txt "$(ls /wheel/taut-*.whl)[${EXTRAS}]"

# Not root. The home folder, which has the caches, may be written by any user that docker run --user names.
RUN useradd --create-home --home-dir /taut taut && chmod 1777 /taut && mkdir --mode=1777 /taut/.cache /work
ENV HOME=/taut USER=taut
USER taut
WORKDIR /work
ENTRYPOINT ["taut"]
CMD ["--help"]

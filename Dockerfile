# The two commands of the README on a bare Debian, as an ordinary user.
#   docker build -t tq-book .                        (--build-arg TEST=0 leaves the tests out: 20 minutes less)
#   docker run --rm -p 8000:8000 tq-book             the book on http://127.0.0.1:8000/
FROM debian:12-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make python3 python3-venv ca-certificates chromium \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home reader
USER reader
WORKDIR /home/reader/book
COPY --chown=reader . .
RUN make reproduce
ARG TEST=1
RUN [ "$TEST" = 0 ] || make test
EXPOSE 8000
CMD ["make", "serve", "HOST=0.0.0.0"]

# syntax=docker/dockerfile:1

# docker build -t oncegate .
# docker run -p 8080:8080 -v oncegate:/var/lib/oncegate oncegate \
#     serve --listen 0.0.0.0:8080 --upstream http://app:3000

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
# Python makes the bill of materials; librdkafka is built with make and a C++ compiler.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ make python3 && rm -rf /var/lib/apt/lists/*
# The caches outlive the step, the binary must not stay in one.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    install -D -m 0755 "$(deploy/build)" /out/usr/local/bin/oncegate \
    && install -d -m 0755 /out/usr/local/share/doc/oncegate \
    && deploy/sbom --binary /out/usr/local/bin/oncegate > /out/usr/local/share/doc/oncegate/oncegate.cdx.json \
    && deploy/sbom --licences > /out/usr/local/share/doc/oncegate/LICENCES-OF-DEPENDENCIES.txt \
    && install -d -m 0700 /out/var/lib/oncegate

# The C library and nothing else: no shell, no package manager.
FROM gcr.io/distroless/cc-debian12:nonroot
LABEL org.opencontainers.image.title="oncegate" \
      org.opencontainers.image.description="An idempotency reverse proxy: safe retries for unmodified HTTP services" \
      org.opencontainers.image.licenses="Apache-2.0 OR MIT"
COPY --from=build /out/usr/local/bin/oncegate /usr/local/bin/oncegate
COPY --from=build /out/usr/local/share/doc/oncegate /usr/local/share/doc/oncegate
COPY --from=build --chown=nonroot:nonroot /out/var/lib/oncegate /var/lib/oncegate
USER nonroot:nonroot

# The default store, `sqlite:oncegate.db`, is a file here. Keep the volume: its records are the promise.
WORKDIR /var/lib/oncegate
VOLUME /var/lib/oncegate

# 8080 takes requests. The admin listener stays on the container's loopback address unless it is given another one and
# a token (`ONCEGATE_ADMIN__LISTEN`, `ONCEGATE_ADMIN__TOKEN_FILE`).
EXPOSE 8080

# There is no shell for a probe: the binary asks its own admin listener, which it finds by the same variables, or by the
# configuration file that ONCEGATE_CONFIG names. It does not see the arguments of `serve`. A gate whose store is away is
# healthy: what replaces unhealthy containers would lose the answers that wait to be written.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["/usr/local/bin/oncegate", "health", "--store-optional"]

# Settings are arguments here and not in the environment, where they would win over a configuration file.
ENTRYPOINT ["/usr/local/bin/oncegate"]
CMD ["serve", "--listen", "0.0.0.0:8080"]

# Stands in for redis:7 where no registry can be reached.
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null && rm -rf /var/lib/apt/lists/* \
    && mkdir /data && chown redis /data
USER redis
WORKDIR /data
CMD ["redis-server"]

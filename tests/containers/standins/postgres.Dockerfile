# Stands in for postgres:16 where no registry can be reached: Debian's PostgreSQL behind the same environment, volume and
# folder of first-start scripts. No cluster and no self-signed certificate are made while it is built.
FROM debian:bookworm-slim
RUN mkdir -p /etc/postgresql-common && echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf \
    && apt-get update -qq \
    && { apt-get install -y -qq --no-install-recommends postgresql >/dev/null 2>&1 \
        || { rm -f /var/lib/dpkg/info/ssl-cert.postinst && dpkg --configure -a >/dev/null; }; } \
    && rm -rf /var/lib/apt/lists/*
COPY postgres-start.sh /usr/local/bin/postgres-start
ENV PATH=/usr/lib/postgresql/15/bin:$PATH
RUN mkdir -p /var/lib/postgresql/data /docker-entrypoint-initdb.d && chown -R postgres /var/lib/postgresql
USER postgres
CMD ["postgres-start"]

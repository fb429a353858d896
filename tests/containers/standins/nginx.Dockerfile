# Stands in for nginx:1 where no registry can be reached.
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends curl nginx-light >/dev/null && rm -rf /var/lib/apt/lists/*
CMD ["nginx", "-g", "daemon off;"]

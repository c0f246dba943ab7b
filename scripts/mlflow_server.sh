#!/usr/bin/env bash
# An MLflow server for draftforge's registry, on SQLite or PostgreSQL. It keeps the artifacts too, so that no client
# needs a disk in common with it: clients only set MLFLOW_TRACKING_URI=http://HOST:PORT.
#   scripts/mlflow_server.sh ARTIFACTS [PORT] [HOST]
# ARTIFACTS: a folder, or an address such as s3://bucket/path. PORT: 5000. HOST: 127.0.0.1, this machine alone.
# MLFLOW_BACKEND_STORE_URI names the database, in the environment because a command line shows its password to others:
#   sqlite:////data/mlflow.db  or  postgresql+psycopg://USER:PASSWORD@HOST:5432/DATABASE  (pip install 'draftforge[postgres]')
# PYTHON: an interpreter with draftforge; default: this checkout's .venv, else python3.
set -euo pipefail
artifacts=${1:?usage: scripts/mlflow_server.sh ARTIFACTS [PORT] [HOST]}
port=${2:-5000}
host=${3:-127.0.0.1}
store=${MLFLOW_BACKEND_STORE_URI:?must name the database: sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE}
python=${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}
[ -x "$python" ] || python=python3

case $store in
sqlite:///* | postgresql+psycopg://*) ;;
postgresql://*)
	echo "error: MLFLOW_BACKEND_STORE_URI: must begin with postgresql+psycopg:// (the driver that draftforge installs)" >&2
	exit 2
	;;
*)
	echo "error: MLFLOW_BACKEND_STORE_URI: must begin with sqlite:/// or postgresql+psycopg://" >&2
	exit 2
	;;
esac
if [[ $store == postgresql* ]] && ! "$python" -c 'import psycopg' 2>/dev/null; then
	echo "error: $python has no psycopg: pip install 'draftforge[postgres]'" >&2
	exit 2
fi
# One worker over SQLite, which has one writer.
workers=${MLFLOW_WORKERS:-$([[ $store == sqlite* ]] && echo 1 || echo 2)}
# MLflow's queue of server-side jobs (evaluations and such) is eight processes more, none of which a registry needs.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}
export MLFLOW_DISABLE_TELEMETRY=${MLFLOW_DISABLE_TELEMETRY:-true}
exec "$python" -m mlflow server --artifacts-destination "$artifacts" --serve-artifacts \
	--host "$host" --port "$port" --workers "$workers"

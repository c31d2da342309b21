#!/bin/sh
# After an installation or upgrade of fared-lab: an upgrade restarts a worker that runs.
set -e
[ "$1" = configure ] || [ "$1" = 1 ] || [ "$1" = 2 ] || exit 0
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
systemctl try-restart fared-fleet.service

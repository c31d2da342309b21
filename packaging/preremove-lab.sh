#!/bin/sh
# Before a removal, not before an upgrade: ends the worker of a fleet.
set -e
[ "$1" = remove ] || [ "$1" = 0 ] || exit 0
if [ -d /run/systemd/system ]; then
  systemctl disable --now fared-fleet.service 2>/dev/null || true
fi

#!/bin/sh
# After an installation or upgrade, of deb ("configure", previous version) and rpm (number of installed versions). A first installation starts nothing, because
# the configuration is missing. An upgrade restarts what runs, the agent first (Before= of its unit); the kernel forwards meanwhile.
set -e
[ "$1" = configure ] || [ "$1" = 1 ] || [ "$1" = 2 ] || exit 0
if command -v systemd-sysusers >/dev/null; then
  systemd-sysusers fared.conf
fi
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
# A first installation brings networkd.conf.d/10-fared.conf, which networkd reads at its start, and a file of NetworkManager.
if [ "$1" = 1 ] || { [ "$1" = configure ] && [ -z "$2" ]; }; then
  if systemctl is-active --quiet systemd-networkd.service; then
    systemctl restart systemd-networkd.service || echo "fared: restart systemd-networkd by hand, it has not read 10-fared.conf" >&2
  fi
  if systemctl is-active --quiet NetworkManager.service; then
    systemctl reload NetworkManager.service || echo "fared: reload NetworkManager by hand, it has not read 10-fared.conf" >&2
  fi
fi
systemctl try-restart fared-dataplane.service fared.service fared-report.service

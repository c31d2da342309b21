#!/usr/bin/env bash
# github.com/google/nftables v0.3.0 reads the rule "rt classid 7 accept" from the kernel (nft 1.0.6 of Debian 12 or later writes it).
# Expected: three expressions, or an error, or a placeholder for the one that the library does not know.
# Seen: two, without the load of the routing class: the comparison refers to a register that nothing loads. Other loads and conditions that the library does not know
# are left out in the same way, so a program cannot tell a rule that it has read completely from one that it has not.
set -euo pipefail
work=$(mktemp -d)
ns=finding-nft-$$
trap 'ip netns del "$ns" 2>/dev/null || true; rm -rf "$work"' EXIT
ip netns add "$ns"
ip netns exec "$ns" nft -f - <<'X'
table inet f {
 chain in {
  type filter hook input priority 0
  rt classid 7 accept
 }
}
X
cat >"$work/go.mod" <<'X'
module finding

go 1.24
X
cat >"$work/main.go" <<'X'
package main

import (
	"fmt"
	"log"

	"github.com/google/nftables"
)

func main() {
	c, err := nftables.New()
	if err != nil {
		log.Fatal(err)
	}
	rules, err := c.GetRules(&nftables.Table{Name: "f", Family: nftables.TableFamilyINet}, &nftables.Chain{Name: "in"})
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range rules {
		for _, e := range r.Exprs {
			fmt.Printf("%T ", e)
		}
	}
}
X
(cd "$work" && GOFLAGS=-mod=mod go get github.com/google/nftables@v0.3.0 >/dev/null 2>&1 && GOFLAGS=-mod=mod CGO_ENABLED=0 go build -o read .)
seen=$(ip netns exec "$ns" "$work/read")
kernel=$(ip netns exec "$ns" nft --debug=netlink list ruleset | grep -c '\[ .* \]')
if [ "$seen" != "*expr.Cmp *expr.Verdict " ] || [ "$kernel" -lt 3 ]; then echo "changed: the library returns '$seen' of $kernel expressions"; exit 1; fi
echo "as found: the library returns '$seen' of $kernel expressions"

package netsetup

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// attribute returns a file of a device below /sys/class/net, in the device's namespace.
func attribute(t *testing.T, n *netnstest.Namespace, device, name string) string {
	t.Helper()
	out := n.Run("ip", "netns", "exec", n.Name, "cat", filepath.Join("/sys/class/net", device, name))
	return strings.TrimSpace(string(out))
}

// pair makes a veth pair with chosen interface indexes.
func pair(t *testing.T, a *netnstest.Namespace, deviceA string, indexA int, b *netnstest.Namespace, deviceB string, indexB int) {
	t.Helper()
	netnstest.IP(t, "link", "add", "name", deviceA, "index", fmt.Sprint(indexA), "netns", a.Name,
		"type", "veth", "peer", "name", deviceB, "index", fmt.Sprint(indexB), "netns", b.Name)
}

// TestMatchIndex verifies that chosen devices get the interface indexes of their far ends, even if two of them have
// each other's, that they keep their other attributes and get their addresses, that other devices keep their indexes,
// and that a second call changes nothing.
func TestMatchIndex(t *testing.T) {
	netnstest.Require(t, "tc", "ping")
	a, b := netnstest.New(t), netnstest.New(t)
	pair(t, a, "p0.0", 501, b, "s1.0", 502)
	pair(t, a, "p0.1", 502, b, "s1.1", 501)
	pair(t, a, "q0", 503, b, "s1.2", 504)
	text := server + "      - {device: q0, sessions: [{peer: 10.1.1.5, local: 10.1.1.4}]}\n"
	a.IP("link", "set", "p0.0", "mtu", "4321", "address", "02:00:00:00:12:34", "alias", "half a cable", "txqueuelen", "77")
	a.IP("link", "property", "add", "dev", "p0.0", "altname", "another-name")
	b.Addr("s1.0", "10.1.1.3/31")
	b.IP("link", "set", "s1.1", "up")
	b.IP("link", "set", "s1.2", "up")
	addresses := func() string {
		kept := strings.Split(a.IP("-o", "address", "show", "scope", "global"), "\n")
		slices.Sort(kept)
		return strings.Join(kept, "\n")
	}
	var before string
	for i := range 2 {
		if err := apply(t, a, text, Options{Limit: true, MatchIndex: []string{"p*"}}); err != nil {
			t.Fatal(err)
		}
		if i == 1 && addresses() != before {
			t.Errorf("addresses are\n%s\nand were\n%s", addresses(), before)
		}
		before = addresses()
	}
	for device, want := range map[string][2]string{"p0.0": {"502", "502"}, "p0.1": {"501", "501"}, "q0": {"503", "504"}} {
		if got := [2]string{attribute(t, a, device, "ifindex"), attribute(t, a, device, "iflink")}; got != want {
			t.Errorf("%s has ifindex and iflink %q, want %q", device, got, want)
		}
	}
	for name, want := range map[string]string{"mtu": "4321", "address": "02:00:00:00:12:34", "ifalias": "half a cable", "tx_queue_len": "77", "carrier": "1"} {
		if got := attribute(t, a, "p0.0", name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if got := a.IP("link", "show", "dev", "another-name"); !strings.Contains(got, "p0.0") {
		t.Errorf("the other name is gone:\n%s", got)
	}
	if !strings.Contains(before, "10.1.1.2 peer 10.1.1.3/32") || !strings.Contains(before, "10.1.1.4 peer 10.1.1.5/32") {
		t.Errorf("addresses:\n%s", before)
	}
	if _, err := a.Output("ping", "-c", "1", "-W", "5", "10.1.1.3"); err != nil {
		t.Error(err)
	}
}

// TestMatchIndexTaken verifies that the error names the device that has the index already, and that the cable works
// with another index.
func TestMatchIndexTaken(t *testing.T) {
	netnstest.Require(t, "ping")
	a, b := netnstest.New(t), netnstest.New(t)
	pair(t, a, "p0.0", 501, b, "s1.0", 502)
	pair(t, a, "p0.1", 503, b, "s1.1", 504)
	a.IP("link", "add", "other", "index", "502", "type", "bridge")
	a.IP("address", "add", "192.0.2.1/32", "dev", "other")
	b.Addr("s1.0", "10.1.1.3/31")
	err := apply(t, a, server, Options{MatchIndex: []string{"*"}})
	if err == nil || !strings.Contains(err.Error(), "p0.0 has the interface index 501 and its far end has 502, because other has 502 here") || strings.Count(err.Error(), "\n") != 0 {
		t.Errorf("the error is %v", err)
	}
	if got := attribute(t, a, "p0.1", "ifindex"); got != "504" {
		t.Errorf("p0.1 has the index %s, want 504", got)
	}
	if got := a.IP("-brief", "address", "show", "dev", "other"); !strings.Contains(got, "192.0.2.1/32") {
		t.Errorf("the device that has the index has lost its address:\n%s", got)
	}
	if _, err := a.Output("ping", "-c", "1", "-W", "5", "10.1.1.3"); err != nil {
		t.Error(err)
	}
}

// TestMatchIndexRefuses verifies that the error names devices that are not veths and patterns without a device, and
// that other devices get their indexes.
func TestMatchIndexRefuses(t *testing.T) {
	netnstest.Require(t)
	a, b := netnstest.New(t), netnstest.New(t)
	pair(t, a, "p0.0", 501, b, "s1.0", 502)
	a.IP("link", "add", "p0.1", "type", "bridge")
	err := apply(t, a, server, Options{MatchIndex: []string{"p0.*", "up*"}})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`match-index: "up*" matches no sub-port's device`,
		"match-index: p0.1 is of the type bridge: only an end of a veth pair can take the interface index of its far end",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q:\n%v", want, err)
		}
	}
	if got := attribute(t, a, "p0.0", "ifindex"); got != "502" {
		t.Errorf("p0.0 has the index %s, want 502", got)
	}
}

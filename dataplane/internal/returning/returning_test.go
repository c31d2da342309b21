package returning

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const within = time.Minute

// bed is a server with a device eth0 and a namespace for containers.
type bed struct {
	t                 *testing.T
	server, leaf, pod *netnstest.Namespace
	keeper            *Keeper
	path              string // of the keeper's file
	cables            int
}

func (b *bed) open() {
	b.server.Must(func() (err error) { b.keeper, err = Open(b.path, slog.New(slog.DiscardHandler)); return err })
}

func newBed(t *testing.T, restore bool) *bed {
	t.Helper()
	netnstest.Require(t)
	b := &bed{t: t, server: netnstest.New(t), leaf: netnstest.New(t), pod: netnstest.New(t)}
	b.cable()
	b.server.IP("link", "set", "eth0", "up")
	for _, address := range []string{"10.0.0.1/31", "10.9.0.1/24", "fd00:1::1/64"} {
		b.server.IP("address", "add", address, "dev", "eth0", "nodad")
	}
	b.path = filepath.Join(t.TempDir(), "addresses")
	b.open()
	t.Cleanup(func() { b.keeper.Close() })
	b.set(restore)
	return b
}

// cable makes the device.
func (b *bed) cable() {
	b.cables++
	peer := fmt.Sprint("s", b.cables)
	netnstest.Veth(b.t, b.server, "eth0", b.leaf, peer)
	b.leaf.IP("link", "set", peer, "up")
}

func (b *bed) set(restore bool) {
	b.keeper.Set(&farev1.Forwarding{RestoreAddresses: restore, Planes: []*farev1.ForwardingPlane{{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{
		{Device: "eth0"}, {Device: "absent"}, {Device: "other", Netns: b.pod.Name},
	}}}})
}

// addresses returns the global addresses of eth0, sorted.
func (b *bed) addresses() string {
	out, err := b.server.Output("ip", "-o", "address", "show", "dev", "eth0", "scope", "global")
	if err != nil {
		return "no device"
	}
	var all []string
	for line := range strings.Lines(string(out)) {
		all = append(all, strings.Fields(line)[3])
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func (b *bed) until(want string) {
	b.t.Helper()
	netnstest.Eventually(b.t, within, func() error {
		if got := b.addresses(); got != want {
			return fmt.Errorf("eth0 has %q, want %q; findings %v", got, want, b.keeper.Findings())
		}
		return nil
	})
}

const all = "10.0.0.1/31 10.9.0.1/24 fd00:1::1/64"

// journeys are the ways of a device out of the namespace and back, by the calls that these programs make.
var journeys = map[string]func(*bed){
	"DRANET": func(b *bed) {
		b.server.IP("link", "set", "eth0", "down")
		b.server.IP("link", "set", "eth0", "netns", b.pod.Name, "name", "rail0")
		b.pod.IP("link", "set", "rail0", "down")
		b.pod.IP("link", "set", "rail0", "netns", b.server.Name, "name", "eth0")
		b.server.IP("link", "set", "eth0", "up")
	},
	"host-device": func(b *bed) {
		temporary := netnstest.New(b.t)
		b.server.IP("link", "set", "eth0", "down")
		b.server.IP("link", "set", "eth0", "netns", temporary.Name)
		temporary.IP("link", "set", "eth0", "alias", "eth0")
		temporary.IP("link", "set", "eth0", "name", "net1")
		temporary.IP("link", "set", "net1", "netns", b.pod.Name)
		b.pod.IP("link", "set", "net1", "up")
		b.pod.IP("link", "set", "net1", "down")
		b.pod.IP("link", "set", "net1", "netns", temporary.Name)
		temporary.IP("link", "set", "net1", "name", "eth0")
		temporary.IP("link", "set", "eth0", "netns", b.server.Name)
		b.server.IP("link", "set", "eth0", "up")
	},
	"a reload of the driver": func(b *bed) {
		b.server.IP("link", "delete", "eth0")
		b.cable()
		b.server.IP("link", "set", "eth0", "mtu", "1500", "up")
	},
	"down and up": func(b *bed) {
		b.server.IP("link", "set", "eth0", "down")
		b.server.IP("link", "set", "eth0", "up")
	},
}

// TestAddressesReturn takes the device away in each way, twice, and checks that it has its addresses again, and no
// finding.
func TestAddressesReturn(t *testing.T) {
	for name, journey := range journeys {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, true)
			for range 2 {
				journey(b)
				b.until(all)
				if found := b.keeper.Findings(); len(found) > 0 {
					t.Errorf("findings %v", found)
				}
			}
		})
	}
}

// TestReturnBeforeItIsRead checks that a device has its addresses again if it leaves and returns, with its index, or
// goes down and up, before the process reads it.
func TestReturnBeforeItIsRead(t *testing.T) {
	b := newBed(t, true)
	for _, name := range []string{"DRANET", "host-device", "down and up"} {
		b.keeper.mu.Lock()
		journeys[name](b)
		b.keeper.mu.Unlock()
		b.until(all)
	}
}

// TestReturnWithoutAddresses checks that they are a finding without the key, which ends when the device has others of
// each family, or when the control plane wants them back.
func TestReturnWithoutAddresses(t *testing.T) {
	b := newBed(t, false)
	finding := func(want string) {
		t.Helper()
		netnstest.Eventually(t, within, func() error {
			if found := fmt.Sprint(b.keeper.Findings()); !strings.Contains(found, want) || want == "" && found != "[]" {
				return errors.New(found)
			}
			return nil
		})
	}
	journeys["DRANET"](b)
	finding("sub-port eth0: its device was away and has returned without 10.0.0.1/31, 10.9.0.1/24, fd00:1::1/64; ip address add 10.0.0.1/31 dev eth0, or set dataplane.restore_addresses: true")
	b.server.IP("address", "add", "10.0.0.3/31", "dev", "eth0")
	finding("returned without fd00:1::1/64")
	b.set(true)
	b.until("10.0.0.3/31 fd00:1::1/64")
	finding("")
	journeys["host-device"](b)
	b.until("10.0.0.3/31 fd00:1::1/64")
}

// TestRemovedAddressesStayAway checks that an address which an operator removes from a present device is not given
// back, whatever happens later.
func TestRemovedAddressesStayAway(t *testing.T) {
	b := newBed(t, true)
	b.server.IP("address", "delete", "10.9.0.1/24", "dev", "eth0")
	netnstest.Eventually(t, within, func() error {
		b.keeper.mu.Lock()
		defer b.keeper.mu.Unlock()
		if known := b.keeper.subPorts["eth0"].known; len(known) != 2 {
			return fmt.Errorf("known: %v", known)
		}
		return nil
	})
	journeys["DRANET"](b)
	b.until("10.0.0.1/31 fd00:1::1/64")
}

// TestAddressesOutliveTheProcess checks that a process which has ended while the device was away, or before it came
// back, has a successor that gives the addresses back; and that the successor does not give back one of several which
// an operator has removed meanwhile.
func TestAddressesOutliveTheProcess(t *testing.T) {
	b := newBed(t, true)
	leave := func() {
		b.server.IP("link", "set", "eth0", "down")
		b.server.IP("link", "set", "eth0", "netns", b.pod.Name, "name", "rail0")
	}
	arrive := func() {
		b.pod.IP("link", "set", "rail0", "netns", b.server.Name, "name", "eth0")
		b.server.IP("link", "set", "eth0", "up")
	}
	restart := func() {
		b.keeper.Close()
		b.open()
		b.set(true)
	}
	for _, steps := range [][]func(){
		{leave, restart, arrive},
		{func() {
			leave()
			b.set(true)
			b.keeper.Close()
			arrive()
			b.open()
			b.set(true)
		}}, // Set reads the devices
		{func() { b.keeper.Close(); leave(); arrive(); b.open(); b.set(true) }}, // it has the same index
		{func() { b.server.IP("link", "set", "eth0", "down") }, restart, func() { b.server.IP("link", "set", "eth0", "up") }},
		{leave, restart, func() { b.pod.IP("link", "set", "rail0", "netns", b.server.Name, "name", "eth0") }, restart, func() { b.server.IP("link", "set", "eth0", "up") }},
		{leave, func() { b.set(true) }, restart, restart, arrive, restart},
	} {
		for _, step := range steps {
			step()
		}
		b.until(all)
	}
	b.keeper.Close()
	b.server.IP("address", "delete", "10.9.0.1/24", "dev", "eth0")
	b.open()
	b.set(true)
	b.until("10.0.0.1/31 fd00:1::1/64")
	b.keeper.Close()
	if err := os.WriteFile(b.path, []byte(`[{"device": "eth0", "ind`), 0o600); err != nil { // by a full disk
		t.Fatal(err)
	}
	b.open()
	b.set(true)
	leave()
	arrive()
	b.until("10.0.0.1/31 fd00:1::1/64")
}

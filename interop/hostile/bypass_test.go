package hostile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"

	"github.com/fared/fared/internal/netnstest"
)

// bypassKey is the environment variable that makes the test's binary run GoBGP without the guard, in place of tests.
const bypassKey = "FARED_HOSTILE_BYPASS"

// bypass runs GoBGP with a passive neighbor in every plane until the process is killed. It is the version of the daemon, with the daemon's families
// and timers.
func bypass() error {
	ctx := context.Background()
	s := server.NewBgpServer()
	go s.Serve()
	if err := s.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{Asn: serverAS, RouterId: "10.255.0.1", ListenPort: bgpPort, ListenAddresses: []string{"0.0.0.0"}}}); err != nil {
		return err
	}
	for p := range planes {
		peer := &api.Peer{
			Conf:      &api.PeerConf{NeighborAddress: leafAddress(p).String(), PeerAsn: uint32(leafAS(p))},
			Transport: &api.Transport{PassiveMode: true, LocalAddress: serverAddress(p).String()},
			Timers:    &api.Timers{Config: &api.TimersConfig{HoldTime: holdTime, KeepaliveInterval: holdTime / 3, IdleHoldTimeAfterReset: 1}},
		}
		for _, afi := range []api.Family_Afi{api.Family_AFI_IP, api.Family_AFI_IP6} {
			peer.AfiSafis = append(peer.AfiSafis, &api.AfiSafi{Config: &api.AfiSafiConfig{Family: &api.Family{Afi: afi, Safi: api.Family_SAFI_UNICAST}, Enabled: true}})
		}
		if err := s.AddPeer(ctx, &api.AddPeerRequest{Peer: peer}); err != nil {
			return err
		}
	}
	select {}
}

// fatal are attacks that end a GoBGP without the guard: both contain messages of an unknown type.
var fatal = []string{"bad headers before OPEN", "bad headers"}

// bypassLimit is the longest duration of an attack on GoBGP, which pauses after each connection. A fatal message comes early.
const bypassLimit = time.Minute

// TestGuardBypassed runs attacks against GoBGP without the guard. The judge must notice that each of them ends the process, and thereby sessions of
// other leaves.
func TestGuardBypassed(t *testing.T) {
	netnstest.Require(t)
	n := newNetwork(t)
	t.Setenv(bypassKey, "1")
	noticed := 0
	for _, x := range attacks {
		if !slices.Contains(fatal, x.name) {
			continue
		}
		noticed++
		if err := x.bypassed(t, n); err == nil {
			t.Errorf("%s: GoBGP and the sessions of other leaves have survived for %v: the judge would notice nothing", x.name, bypassLimit)
		} else {
			t.Logf("%s: %.300s", x.name, fmt.Sprint(err))
		}
	}
	if noticed != len(fatal) {
		t.Errorf("%d of %d attacks found: this test has lost its subject", noticed, len(fatal))
	}
}

// bypassed runs an attack against GoBGP until the judge notices a failure, and returns it.
func (x attack) bypassed(t *testing.T, n *network) error {
	t.Helper()
	process := n.server.Start(t, os.Args[0])
	defer process.Kill()
	var leaves []*leaf
	for _, p := range []int{prober, steady} {
		l, err := newLeaf(n.far, p, few)
		if err != nil {
			t.Fatal(err)
		}
		defer l.stop()
		l.dial(n.far)
		leaves = append(leaves, l)
	}
	judge := func() error {
		var errs []error
		for _, l := range leaves {
			errs = append(errs, l.judge())
		}
		return errors.Join(append([]error{process.Running()}, errs...)...)
	}
	netnstest.Eventually(t, startLimit, judge)
	ctx, cancel := context.WithTimeout(t.Context(), bypassLimit)
	defer cancel()
	a, err := newAttacker(ctx, n.far)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		x.run(a)
	}()
	defer func() {
		cancel()
		<-done
	}()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := judge(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

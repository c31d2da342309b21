package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
)

// TestOldAnswersDecideNothing checks that an acknowledgement or refusal of an earlier change leaves an object's newer
// change pending.
func TestOldAnswersDecideNothing(t *testing.T) {
	e, o, now := newShown(time.Unix(0, 0)), dpclient.Object{Kind: dpclient.KindVector, Vector: 1}, time.Unix(1, 0)
	is := func(what string, want effectState, reason string) {
		t.Helper()
		counts := [effectStates]int{}
		if want < effectStates {
			counts[want] = 1
		}
		if e.counts != counts || e.inEffect(o) != (want == effectDone) || e.reason(o) != reason {
			t.Errorf("%s: %d pending, done, approximate, refused, in effect %v, reason %q; want %d, %q", what, e.counts, e.inEffect(o), e.reason(o), counts, reason)
		}
	}
	e.want(o, 1, now)
	e.want(o, 2, now.Add(time.Second))
	is("declared twice", effectPending, "")
	for state := effectDone; state < effectStates; state++ {
		if before, ok := e.answered(o, 1, state, "old"); ok {
			t.Errorf("the first change's answer ended the second, declared at %v", before.since)
		}
		is("an old answer", effectPending, "")
	}
	before, ok := e.answered(o, 2, effectDone, "")
	if !ok || before.state != effectPending || before.since != 2*time.Second {
		t.Errorf("acknowledged: %v, %+v", ok, before)
	}
	is("acknowledged", effectDone, "")
	if before, _ := e.answered(o, 2, effectDone, ""); before.state != effectDone {
		t.Errorf("acknowledged once more: was %+v", before)
	}
	e.want(o, 2, now)
	is("declared without a change", effectDone, "")
	e.answered(o, 2, effectApproximate, "off")
	is("approximate", effectApproximate, "off")
	e.answered(o, 2, effectRefused, "full")
	is("refused", effectRefused, "full")
	e.lost(o)
	is("lost", effectPending, "")
	e.answered(o, 2, effectRefused, "full")
	e.want(o, 3, now)
	is("declared after a refusal", effectPending, "")
	e.forget(o)
	is("forgotten", effectStates, "")
}

// TestFlapIsHeldUp checks that after a flap a link counts once it has lasted increase_hold_up; another flap in between
// restarts the time.
func TestFlapIsHeldUp(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, NoSpeed: true, Extra: "path_bandwidth: {increase_hold_up: 1h}\n"}
	l := idle(t, s.Text())
	began := l.wokenAt
	at := func(after time.Duration, what string, up bool) {
		t.Helper()
		l.wokenAt = began.Add(after)
		l.timers()
		if l.core.SubPort(0).Up != up {
			t.Errorf("%v, %s: the link counts: %v, want %v", after, what, l.core.SubPort(0).Up, up)
		}
	}
	l.link(&LinkEvent{Up: true, Speed: 100e9, Transitions: 1})
	at(0, "the first state", true)
	l.link(&LinkEvent{Up: true, Speed: 100e9, Transitions: 3})
	at(0, "a flap in one event", false)
	at(40*time.Minute, "held up", false)
	l.link(&LinkEvent{Up: true, Speed: 100e9, Transitions: 5})
	at(70*time.Minute, "another flap after 40 minutes", false)
	l.link(&LinkEvent{Up: true, Speed: 100e9, Transitions: 5})
	at(99*time.Minute, "the same state once more", false)
	at(101*time.Minute, "an hour after the last flap", true)
}

// TestPinsOfOneFamily checks that a destination's pairs are those of the loopbacks of its own family.
func TestPinsOfOneFamily(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32", "\"fd00::1/128\"", "10.255.0.2/32"}}
	l := idle(t, strings.Replace(s.Text(), "accept: [", "accept: [\"fd00::/16\", ", 1))
	for destination, want := range map[string]string{"10.255.9.9/32": "10.255.0.1/32 10.255.0.2/32", "fd00::9/128": "fd00::1/128"} {
		var got []string
		for _, p := range l.pairPorts(dpclient.Destination{Prefix: netip.MustParsePrefix(destination)}, 1) {
			got = append(got, p.Source)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: pins from %v, want %s", destination, got, want)
		}
	}
}

// TestDrainBeforeMoveIsProgrammed checks that slots that lose addresses, and no others, are marked toward the data
// plane.
func TestDrainBeforeMoveIsProgrammed(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Extra: "weights: {ordering: ORDERING}\n"}
	marked, unmarked := 0, 0
	for _, ordering := range []string{"partial", "strong"} {
		l := idle(t, strings.Replace(s.Text(), "ORDERING", ordering, 1))
		bring(t, s.Defaults(), l.core, 1, func(int, int) fare.Bandwidth { return 400e9 })
		l.core.Updates()
		for _, value := range []fare.Bandwidth{100e9, 400e9, 200e9} {
			do(t, l.core, core.Fabric{Event: fare.RouteUpdate{Session: 0, Generation: 1, Prefix: destination(0), Attrs: attributes(value, s.PeerAS(0), 65001)}})
			for _, u := range l.core.Updates() {
				v, ok := l.core.Vector(u.Vector)
				if !ok {
					continue
				}
				for i, slot := range l.group(u.Vector).Slots {
					if slot.DrainBeforeMove != v.Slots[i].Drain {
						t.Errorf("%s: slot %d is programmed with drain_before_move %v, the engine says %v", ordering, i, slot.DrainBeforeMove, v.Slots[i].Drain)
					}
					if slot.DrainBeforeMove {
						marked++
					} else {
						unmarked++
					}
				}
			}
		}
	}
	if marked == 0 || unmarked == 0 {
		t.Errorf("%d slots marked, %d not: the test does not try what it is for", marked, unmarked)
	}
}

// helloSpy keeps the last Forwarding that a client sent.
type helloSpy struct {
	grpc.ClientConnInterface
	last atomic.Pointer[farev1.Forwarding]
}

func (s *helloSpy) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if hello, ok := args.(*farev1.HelloRequest); ok {
		s.last.Store(proto.CloneOf(hello.Forwarding))
	}
	return s.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

// TestLearnedNextHops checks that a neighbor's address that was not configured reaches the data plane, and that a
// reload keeps it.
func TestLearnedNextHops(t *testing.T) {
	dp := memory.New(memory.Config{})
	conn, err := memory.Dial(dp)
	if err != nil {
		t.Fatal(err)
	}
	spy := &helloSpy{ClientConnInterface: conn}
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{dp: dp, conn: spy, leaves: announceAll(400e9, 1)})
	t.Cleanup(func() {
		r.stop()
		conn.Close()
	})
	r.wait(destination(0), "1:1")
	learned := netip.MustParseAddr("192.0.2.77")
	nextHop := func(f *farev1.Forwarding) string { return f.GetPlanes()[1].SubPorts[0].NextHopV4 }
	r.inside(func(l *loop) { l.learnNextHop(1, learned) })
	eventually(t, "the data plane has the learned next hop", func() bool { return nextHop(spy.last.Load()) == learned.String() })
	r.inside(func(l *loop) {
		before := proto.CloneOf(forwardingOf(l.core))
		next, err := config.Parse("next", []byte(strings.Replace(r.s.Text(), "as:", "drain_delay: 7s\nas:", 1)))
		if err != nil {
			t.Error(err)
			return
		}
		l.reload(next)()
		if after := forwardingOf(l.core); !proto.Equal(after, before) {
			t.Errorf("after a reload the data plane is given %v, before %v", after, before)
		}
	})
	r.inside(func(l *loop) {
		next, err := config.Parse("next", []byte(strings.Replace(r.s.Text(), "loopbacks: [", "loopbacks: [10.255.0.9/32, ", 1)))
		if err != nil {
			t.Error(err)
			return
		}
		l.reload(next)()
	})
	eventually(t, "the data plane has the new loopback", func() bool { return slices.Contains(spy.last.Load().GetLoopbacks(), "10.255.0.9/32") })
}

// TestLinkEvents checks that a link's first state, its failure and its return are events, that another speed is an
// event of that kind, and that an unchanged state is none.
func TestLinkEvents(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1, NoSpeed: true}.Text())
	var log strings.Builder
	l.log = slog.New(slog.NewTextHandler(&log, nil))
	for _, step := range []struct {
		link LinkEvent
		want status.EventKind
	}{
		{LinkEvent{Up: true, Speed: 400e9, Transitions: 1}, status.EventLinkUp},
		{LinkEvent{Up: true, Speed: 400e9, Transitions: 1}, 0},
		{LinkEvent{Up: true, Speed: 100e9, Transitions: 1}, status.EventSpeed},
		{LinkEvent{Speed: 100e9, Transitions: 2}, status.EventLinkDown},
		{LinkEvent{Speed: 100e9, Transitions: 2}, 0},
		{LinkEvent{Up: true, Speed: 100e9, Transitions: 3}, status.EventLinkUp},
	} {
		log.Reset()
		l.link(&step.link)
		for _, kind := range []status.EventKind{status.EventLinkUp, status.EventLinkDown, status.EventSpeed} {
			if shown := strings.Contains(log.String(), "msg="+kind.String()+" "); shown != (kind == step.want) {
				t.Errorf("%+v: event %v shown: %v, want %v\n%s", step.link, kind, shown, step.want, log.String())
			}
		}
	}
}

// TestReloadWithoutAFile checks that the error of a daemon without a configuration file contains the remedy.
func TestReloadWithoutAFile(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
	_, err := l.d.Reload(t.Context(), true)
	var problem *status.Problem
	if !errors.As(err, &problem) || problem.Subject != "reload" || !strings.Contains(problem.Remedy, "--config") {
		t.Errorf("%+v", err)
	}
}

// TestSkippedFamilies checks that a configured family that was not negotiated needs no End-of-RIB.
func TestSkippedFamilies(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, Session: "families: [ipv4, ipv6], "}.Defaults()
	text := strings.NewReplacer(s.There(0).String(), "\"fd99::1\"", s.Here(0).String(), "\"fd99::2\"")
	for _, agreed := range [][]speaker.Family{{}, {speaker.IPv4}, {speaker.IPv6}, {speaker.IPv4, speaker.IPv6}} {
		l := idle(t, text.Replace(s.Text()))
		do(t, l.core, up(0, 400e9))
		ev, want := speaker.SessionUp{Generation: 1, Node: leafNode(0), PeerAS: s.PeerAS(0)}, [2]bool{true, true}
		for _, f := range agreed {
			ev.Families |= speaker.FamilySet(f)
			want[map[speaker.Family]int{speaker.IPv4: 0, speaker.IPv6: 1}[f]] = false
		}
		l.bgp(ev)
		// The families that are left count as come with one more End-of-RIB each, and not before.
		for i, come := range want {
			if come {
				continue
			}
			if l.core.SessionState(0).EndOfRIB {
				t.Errorf("agreed %v: family %d counts as come", agreed, i)
			}
			l.step(core.EndOfRIB{Generation: 1, IPv6: i == 1})
		}
		if !l.core.SessionState(0).EndOfRIB {
			t.Errorf("agreed %v: the others do not count as come", agreed)
		}
	}
}

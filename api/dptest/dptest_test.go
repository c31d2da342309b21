package dptest_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func dial(t *testing.T, server farev1.DataplaneServiceServer) *memory.Conn {
	t.Helper()
	conn, err := memory.Dial(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

func limited() *farev1.Capabilities {
	return &farev1.Capabilities{MaxVectors: 16, MaxDestinations: 100, MaxWeight: 12, MaxWeightSum: 20}
}

func everything() *farev1.Capabilities {
	return &farev1.Capabilities{PerPacket: true, Ipv6: true, FlowPins: true}
}

// TestEveryCaseApplies checks that every case runs on a data plane without limits or on one with all limits.
func TestEveryCaseApplies(t *testing.T) {
	ran := map[string]bool{}
	for _, variant := range []struct {
		name         string
		capabilities *farev1.Capabilities
		delay        time.Duration // with a delay the data plane sends both levels of acknowledgement
	}{
		{"everything", everything(), 0}, {"limited", limited(), 0}, {"late", everything(), 50 * time.Microsecond},
	} {
		name := variant.name
		dataplane := memory.New(memory.Config{Capabilities: variant.capabilities})
		dataplane.DelayAcks(variant.delay)
		conn := dial(t, dataplane)
		err := dptest.Check(t.Context(), conn, dptest.Options{Batch: batch}, func(r dptest.Result) {
			t.Logf("%s: %v", name, r)
			if r.Status == dptest.Passed {
				ran[r.Name] = true
			}
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	asked := lander{memory.New(memory.Config{Capabilities: everything()})}
	if err := dptest.Check(t.Context(), dial(t, asked), dptest.Options{Batch: batch}, func(r dptest.Result) {
		t.Logf("asked: %v", r)
		ran[r.Name] = ran[r.Name] || r.Status == dptest.Passed
	}); err != nil {
		t.Errorf("asked: %v", err)
	}
	for _, test := range dptest.Tests() {
		if !ran[test.Name] {
			t.Errorf("%s passed nowhere", test.Name)
		}
	}
}

func TestRun(t *testing.T) {
	dptest.Run(t, dial(t, memory.New(memory.Config{Capabilities: everything()})), dptest.Options{
		Seed: 7, Batch: 100, Only: []string{"any-order-ends-equal", "large-batch"},
	})
}

func TestOptionsAreChecked(t *testing.T) {
	conn := dial(t, memory.New(memory.Config{}))
	few := dptest.DefaultForwarding()
	few.Planes = few.Planes[:1]
	for name, options := range map[string]dptest.Options{"unknown case": {Only: []string{"no-such-case"}}, "one plane": {Forwarding: few}} {
		if err := dptest.Check(t.Context(), conn, options, func(dptest.Result) { t.Errorf("%s: a case ran", name) }); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

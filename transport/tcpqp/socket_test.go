package tcpqp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// needsOption skips the test where the kernel or the process cannot write the option.
func needsOption(t testing.TB) {
	t.Helper()
	f, err := newFramer(Config{Port: Port, Option: true}, netip.MustParseAddr("127.0.47.9"))
	if err != nil {
		netnstest.Lacks(t, err.Error())
	}
	f.close()
}

// loopback returns two transports on addresses of the loopback device.
func loopback(c Config) rdmatest.Bed {
	return rdmatest.Real(rdmatest.RealConfig{
		Addresses:  [2]netip.Addr{netip.MustParseAddr("127.0.47.1"), netip.MustParseAddr("127.0.47.2")},
		Transports: [2]rdma.Transport{New(c), New(c)},
		Planes:     4,
	})
}

func TestModelOnSockets(t *testing.T) {
	times := gate.Count(t, gate.Models, 1, 4)
	for _, test := range []struct {
		name string
		o    rdmatest.Options
	}{
		{"quiet", rdmatest.Options{Ops: 1000 * times}},
		{"not ready", rdmatest.Options{Ops: 500 * times, NotReady: 0.3}},
		{"flaps", rdmatest.Options{Ops: 1000 * times, Channels: 4, Flap: 5 * time.Millisecond, NotReady: 0.05}},
		{"long", rdmatest.Options{Ops: 100 * times, MaxSize: maxOp, Window: 4}},
	} {
		for _, option := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, option %v", test.name, option), func(t *testing.T) {
				if option {
					needsOption(t)
				}
				o := test.o
				o.Apart, o.Settle = true, 50*time.Millisecond
				result := rdmatest.ChannelsOn(t, loopback(Config{Option: option}), o)
				t.Logf("%d operations in %v: %v", result.Ops, result.Time, result.Counters)
				for _, c := range result.Counters {
					if (c["options_written"] > 0) != option || (c["options_received"] > 0) != option {
						t.Errorf("with the option: %v; counters: %v", option, c)
					}
					// The send buffer holds no more segments than there are marks, and no piece is cut.
					if test.o.Flap == 0 && c["options_unmarked"]+c["options_cut"]+c["options_batched"]+c["options_foreign"] > 0 {
						t.Errorf("counters: %v", c)
					}
				}
			})
		}
	}
}

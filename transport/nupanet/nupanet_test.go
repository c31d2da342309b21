package nupanet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/nupa"
)

// cable is a cable between two namespaces.
type cable struct {
	t     testing.TB
	space [2]*netnstest.Namespace
	end   [2]context.CancelFunc
	ended [2]chan error
	cfg   Config
}

// kinds are the kinds of memory.
var kinds = []struct {
	name string
	cfg  Config
}{
	{"one kernel", Config{}},
	{"shared", Config{Memory: nupa.Config{Shared: true}}},
	{"non-coherent", Config{NonCoherent: true}},
}

func newCable(t testing.TB, cfg Config) *cable {
	netnstest.Require(t)
	c := &cable{t: t, cfg: cfg, space: [2]*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}}
	m := &c.cfg.Memory
	m.File, m.Size, m.Channels = filepath.Join(t.TempDir(), "memory"), 16<<20, 8
	return c
}

// joined returns a cable whose ends run and have carrier.
func joined(t testing.TB, cfg Config) *cable {
	c := newCable(t, cfg)
	for i := range 2 {
		c.start(i)
	}
	for i := range 2 {
		c.carrier(i, true)
	}
	return c
}

func address(i int) string { return fmt.Sprint("10.1.0.", i+1) }

// start starts an end, and gives its device an address.
func (c *cable) start(i int) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	names := [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	cfg := c.cfg
	cfg.Local, cfg.Peer, cfg.Device, cfg.MTU, cfg.Log = names[i], names[1-i], "nupanet0", 9000, slog.New(slog.DiscardHandler)
	ended := make(chan error, 1)
	c.end[i], c.ended[i] = cancel, ended
	go func() { ended <- c.space[i].Do(func() error { return Run(ctx, cfg) }) }()
	netnstest.Eventually(c.t, time.Minute, func() error {
		select {
		case err := <-ended:
			c.t.Fatalf("end %d: %v", i, err)
		default:
		}
		out, err := c.space[i].Output("ip", "addr", "replace", address(i)+"/24", "dev", "nupanet0")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

func (c *cable) stop(i int) {
	c.t.Helper()
	c.end[i]()
	if err := <-c.ended[i]; err != nil {
		c.t.Errorf("end %d: %v", i, err)
	}
}

// carrier waits until the device at an end has carrier, or none.
func (c *cable) carrier(i int, want bool) {
	c.t.Helper()
	netnstest.Eventually(c.t, time.Minute, func() error {
		if text := c.space[i].IP("link", "show", "nupanet0"); strings.Contains(text, "LOWER_UP") != want {
			return errors.New(text)
		}
		return nil
	})
}

// transfer sends data from end i to the other by TCP, and returns what has arrived.
func (c *cable) transfer(i int, data io.Reader, into io.Writer) {
	c.t.Helper()
	var l net.Listener
	if err := c.space[1-i].Do(func() (err error) {
		l, err = net.Listen("tcp", address(1-i)+":0")
		return err
	}); err != nil {
		c.t.Fatal(err)
	}
	defer l.Close()
	received := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			_, err = io.Copy(into, conn)
			conn.Close()
		}
		received <- err
	}()
	var conn net.Conn
	c.space[i].Must(func() (err error) { conn, err = net.Dial("tcp", l.Addr().String()); return err })
	if _, err := io.Copy(conn, data); err != nil {
		c.t.Fatal(err)
	}
	conn.Close()
	if err := <-received; err != nil {
		c.t.Fatal(err)
	}
}

// TestCable carries TCP and large ICMP packets both ways, while each end is replaced once.
func TestCable(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			kind.cfg.Memory.DeadAfter = 5 * time.Second
			if kind.cfg.NonCoherent {
				kind.cfg.Memory.DeadAfter = time.Second // beats count, not time
			}
			c := newCable(t, kind.cfg)
			defer goleak.VerifyNone(t)
			c.start(0)
			c.carrier(0, false)
			c.start(1)
			data := make([]byte, gate.Count(t, gate.Models, 6<<20, 20<<20))
			rng := rand.NewChaCha8([32]byte{1})
			rng.Read(data)
			check := func() {
				t.Helper()
				for i := range 2 {
					c.carrier(i, true)
				}
				for i := range 2 {
					sum := sha256.New()
					c.transfer(i, bytes.NewReader(data), sum)
					if got, want := sum.Sum(nil), sha256.Sum256(data); !bytes.Equal(got, want[:]) {
						t.Errorf("from end %d: the data has changed", i)
					}
					if out, err := c.space[i].Output("ping", "-c", "3", "-i", "0.01", "-s", "60000", address(1-i)); err != nil {
						t.Errorf("ping from end %d: %v\n%s", i, err, out)
					}
				}
			}
			check()
			for i := range 2 {
				c.stop(i)
				c.carrier(1-i, false)
				c.start(i)
				check()
			}
			c.stop(0)
			c.stop(1)
		})
	}
}

// TestReplaced takes the place in the memory of an end that has a peer, and of one that has none, as another machine
// with its name does. The end ends with the reason: its service starts it once more, or shows the mistake.
func TestReplaced(t *testing.T) {
	for _, peer := range []bool{false, true} {
		t.Run(fmt.Sprintf("peer %v", peer), func(t *testing.T) {
			c := newCable(t, Config{Memory: nupa.Config{Shared: true, DeadAfter: 5 * time.Second}})
			defer goleak.VerifyNone(t)
			c.start(0)
			if peer {
				c.start(1)
				c.carrier(0, true)
				defer c.stop(1)
			}
			// The generation, address and heartbeat of a place, by the description of the layout
			// (transport/nupa/layout.go).
			name := netip.MustParseAddr("192.0.2.1").As16()
			netnstest.Eventually(t, time.Minute, func() error {
				memory, err := os.OpenFile(c.cfg.Memory.File, os.O_RDWR, 0)
				if err != nil {
					return err
				}
				defer memory.Close()
				for i := range int64(64) {
					var place [320]byte
					if _, err := memory.ReadAt(place[:], 4096+320*i); err != nil {
						return err
					}
					if bytes.Equal(place[16:32], name[:]) && !bytes.Equal(place[144:152], make([]byte, 8)) {
						_, err := memory.WriteAt([]byte{place[0] + 2}, 4096+320*i)
						return err
					}
				}
				return errors.New("no place")
			})
			select {
			case err := <-c.ended[0]:
				if err == nil || !strings.Contains(err.Error(), "another endpoint has taken this one's place") {
					t.Errorf("ended with %v", err)
				}
			case <-time.After(time.Minute):
				t.Error("goes on")
				c.stop(0)
			}
		})
	}
}

func TestRunRefuses(t *testing.T) {
	c := newCable(t, Config{})
	for _, tc := range []struct {
		change func(*Config)
		want   string
	}{
		{func(cfg *Config) { cfg.Device = strings.Repeat("x", 20) }, "device"},
		{func(cfg *Config) { cfg.MTU = 100000 }, "MTU 100000"},
		{func(cfg *Config) { cfg.Memory.File = "/dev/null" }, "/dev/null"},
		{func(cfg *Config) { cfg.NonCoherent, cfg.Device = true, strings.Repeat("x", 20) }, "device"},
		{func(cfg *Config) { cfg.NonCoherent, cfg.Memory.File = true, "/dev/null" }, "/dev/null"},
		{func(cfg *Config) { cfg.NonCoherent, cfg.Memory.DeadAfter = true, time.Millisecond }, "Config.DeadAfter"},
	} {
		cfg := Config{Memory: c.cfg.Memory, Local: netip.MustParseAddr("192.0.2.1"), Peer: netip.MustParseAddr("192.0.2.2"), Device: "nupanet0", MTU: 1500,
			Log: slog.New(slog.DiscardHandler)}
		tc.change(&cfg)
		err := c.space[0].Do(func() error { return Run(t.Context(), cfg) })
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got %v, want %q", err, tc.want)
		}
	}
}

// BenchmarkTCP measures the goodput of one TCP connection over the cable.
func BenchmarkTCP(b *testing.B) {
	for _, kind := range kinds {
		b.Run(kind.name, func(b *testing.B) {
			c := joined(b, kind.cfg)
			const size = 256 << 20
			b.SetBytes(size)
			for b.Loop() {
				c.transfer(0, io.LimitReader(zeros{}, size), io.Discard)
			}
			c.stop(0)
			c.stop(1)
		})
	}
}

// BenchmarkIdle measures the processor time of an end without packets, in percent of a processor.
func BenchmarkIdle(b *testing.B) {
	for _, kind := range kinds {
		b.Run(kind.name, func(b *testing.B) {
			c := joined(b, kind.cfg)
			begin := netnstest.CPU(b)
			for b.Loop() {
				time.Sleep(time.Second) // the measured interval
			}
			used := netnstest.CPU(b) - begin
			b.ReportMetric(100*used.Seconds()/b.Elapsed().Seconds()/2, "%-of-a-processor")
			c.stop(0)
			c.stop(1)
		})
	}
}

// zeros is a reader without an end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

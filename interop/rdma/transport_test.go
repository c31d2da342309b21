package rdma

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	rocev2 "github.com/fared/fared/transport/roce"
)

// TestReadsFromRxe reads from rdma_rxe by transport/roce over a cable that drops packets in both directions, and
// changes a word by atomics in between. The window shrinks, so that READs are requested in parts: the data is right,
// each atomic is executed once, and rdma_rxe finds nothing to refuse, with any limit of outstanding requests.
func TestReadsFromRxe(t *testing.T) {
	gate.Slow(t, gate.VM, "needs rdma_rxe, in a virtual machine")
	netnstest.Require(t, "tc")
	b := newPairBed(t)
	const length, word = 1 << 20, 1 << 19
	for _, limit := range []int{1, 2, 16} {
		t.Run(fmt.Sprint("limit ", limit), func(t *testing.T) {
			var device *rdma.Device
			b.host.Must(func() (err error) {
				device, err = rdma.Open(rdma.Config{Address: netip.MustParseAddr(softAddress), Transports: []rdma.Transport{rocev2.New(rocev2.Config{})}})
				return err
			})
			defer device.Close()
			pd, cq := device.AllocPD(), device.CreateCQ()
			local, err := pd.Alloc(length, rdma.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			set, offer, err := device.Offer(netip.MustParseAddr(rxeAddress), rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq}, []rdma.Slot{{Slot: 0, Plane: "p0", Port: 51234, Share: 1e9}})
			if err != nil {
				t.Fatal(err)
			}
			ours, err := rocev2.ParseParameters(offer.GetChannels()[0].GetParameters())
			if err != nil {
				t.Fatal(err)
			}
			var log strings.Builder
			target := exec.Command(filepath.Join(folder, "target"), rxeDevice, "1", "::ffff:"+softAddress, fmt.Sprint(ours.QPN), fmt.Sprint(ours.PSN), fmt.Sprint(limit), fmt.Sprint(length))
			target.Stderr = &log
			in, err := target.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := target.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := target.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				in.Close()
				if err := target.Wait(); err != nil {
					t.Errorf("%v: %s", err, log.String())
				}
			}()
			var key uint32
			var address uint64
			theirs := rocev2.Parameters{PSN: 1, MTU: 1024, ReadAtomic: limit}
			if _, err := fmt.Fscan(out, &theirs.QPN, &key, &address); err != nil {
				t.Fatal(err)
			}
			if err := set.Finish(&farev1.ConnectAnswer{Channels: []*farev1.ChannelEnd{{Transport: "roce", Slots: []uint32{0}, Parameters: theirs.Bytes()}}}); err != nil {
				t.Fatal(err)
			}
			post := func(wr rdma.SendWR, offset, n int) {
				t.Helper()
				wr.ID, wr.Local, wr.RemoteKey = uint64(offset), rdma.SGE{MR: local, Offset: offset, Length: n}, key
				if _, err := set.PostSend(wr); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			wait := func(n int) {
				t.Helper()
				batch := make([]rdma.Completion, 16)
				for n > 0 {
					k, err := cq.Wait(ctx, batch)
					if err != nil {
						t.Fatalf("%v: counters %v", err, device.Counters())
					}
					for _, c := range batch[:k] {
						if c.Err != nil {
							t.Fatalf("%+v: counters %v; %s", c, device.Counters(), log.String())
						}
					}
					n -= k
				}
			}
			lossy(t, b, "add")
			defer lossy(t, b, "del")
			// Of the memory, the word at word is changed by the atomics, and not read otherwise.
			const rounds, each = 10, 40_000
			var sum uint64
			for round := range rounds {
				for i := range 4 {
					post(rdma.SendWR{Opcode: rdma.Read, RemoteAddress: address + uint64(1000*round+i)}, i*each, each)
				}
				post(rdma.SendWR{Opcode: rdma.FetchAdd, Add: uint64(round + 1), RemoteAddress: address + word}, 4*each, 8)
				wait(5)
				var got []byte
				device.Do(func() { got = append(got, local.Bytes()[:4*each+8]...) })
				for i := range 4 {
					for j, v := range got[i*each : (i+1)*each] {
						if at := 1000*round + i + j; v != byte(13*at+at/256) {
							t.Fatalf("round %d, READ %d: byte %d is %#x", round, i, j, v)
						}
					}
				}
				was := binary.NativeEndian.Uint64(got[4*each:])
				if round == 0 {
					sum = was
				}
				if was != sum {
					t.Fatalf("round %d: the word was %d, want %d", round, was, sum)
				}
				sum += uint64(round + 1)
			}
			c := device.Counters()["roce"]
			t.Log(c)
			if c["read_parts"] == 0 || c["window_cuts"] == 0 || c["retransmitted"] == 0 || c["bad_responses"]+c["malformed"] > 0 {
				t.Errorf("counters %v", c)
			}
		})
	}
}

// lossy adds or deletes filters that drop every fiftieth packet, at random, at both ends of the cable.
func lossy(t *testing.T, b *pairBed, verb string) {
	t.Helper()
	for _, run := range []func(...string) ([]byte, error){
		func(args ...string) ([]byte, error) {
			return exec.Command("tc", append(args, "dev", "rxenet", "clsact")...).CombinedOutput()
		},
		func(args ...string) ([]byte, error) {
			return b.host.Output("tc", append(args, "dev", "eth0", "clsact")...)
		},
	} {
		if out, err := run("qdisc", verb); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
	if verb == "del" {
		return
	}
	filter := func(device string) []string {
		return strings.Fields("filter add dev " + device + " ingress protocol ip matchall action ok random netrand drop 50")
	}
	if out, err := exec.Command("tc", filter("rxenet")...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b.host.Run("tc", filter("eth0")...)
}

package linux

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fared/fared/dataplane/internal/contract"
)

// BenchmarkLosses sends from three sockets to one destination without a pause, while its weights change: by new weights
// of its vector, which its group takes in place, and by another vector, to whose group its route moves. It reports the
// sends that the kernel refuses in a million changes.
func BenchmarkLosses(b *testing.B) {
	for _, c := range []struct{ name, target string }{{"IPv4", target4(0)}, {"IPv6", target6(0)}} {
		prefix := netip.MustParsePrefix(c.target)
		to := func(from, to uint32) contract.Change {
			return contract.Change{Kind: contract.DestinationChange, Prefix: prefix, From: contract.Destination{Group: from}, To: contract.Destination{Group: to}}
		}
		for _, how := range []string{"group", "route"} {
			b.Run(c.name+"/"+how, func(b *testing.B) {
				n := newBench(b, 2, benchPlanes)
				n.commit(append(n.setGroups(nil, 0, ""), to(0, 1)))
				var sent, refused atomic.Int64
				var senders sync.WaitGroup
				stop := make(chan struct{})
				for range 3 {
					var conn net.Conn
					n.h.Must(func() (err error) {
						conn, err = net.Dial("udp", netip.AddrPortFrom(prefix.Addr(), 4791).String())
						return err
					})
					senders.Go(func() {
						defer conn.Close()
						for {
							select {
							case <-stop:
								return
							default:
							}
							sent.Add(1)
							if _, err := conn.Write([]byte("fared")); err != nil {
								refused.Add(1)
							}
						}
					})
				}
				for state := uint32(0); b.Loop(); state++ {
					if how == "group" {
						n.commit(n.setGroups(nil, int(state+1)%2, ""))
					} else {
						n.commit([]contract.Change{to(1+state%2, 2-state%2)})
					}
				}
				close(stop)
				senders.Wait()
				b.ReportMetric(float64(refused.Load())*1e6/float64(b.N), "refused/Mchanges")
				b.ReportMetric(float64(sent.Load())/float64(b.N), "sent/change")
			})
		}
	}
}

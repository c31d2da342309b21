package tcpqp

import (
	"io"
	"net"
	"net/netip"
	"strconv"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
)

// BenchmarkGoodput compares plain TCP, WRITEs, and WRITEs with the option, over a veth pair. Trials alternate:
//
//	go test -run xxx -bench Goodput -benchtime 300x -count 5 ./transport/tcpqp
func BenchmarkGoodput(b *testing.B) {
	const size = 1 << 20
	b.Run("copy", func(b *testing.B) {
		spaces, addresses := veths(b)
		from, to := tcpPair(b, spaces, addresses)
		data, sink := make([]byte, size), make([]byte, size)
		b.SetBytes(size)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				if _, err := io.ReadFull(to, sink); err != nil {
					return // the sender is done
				}
			}
		}()
		for b.Loop() {
			if _, err := from.Write(data); err != nil {
				b.Fatal(err)
			}
		}
		from.Close()
		<-done
	})
	for _, option := range []bool{false, true} {
		b.Run("write/option="+strconv.FormatBool(option), func(b *testing.B) {
			if option {
				needsOption(b)
			}
			p, _ := onVeths(b, func(c *Config) { c.Option = option })
			goodput(b, p, size)
		})
	}
	for _, option := range []bool{false, true} {
		b.Run("write4K/option="+strconv.FormatBool(option), func(b *testing.B) {
			if option {
				needsOption(b)
			}
			p, _ := onVeths(b, func(c *Config) { c.Option = option })
			goodput(b, p, 4096)
		})
	}
}

// goodput writes b.N times, with 64 outstanding.
func goodput(b *testing.B, p *pair, size int) {
	data := make([]byte, size)
	ops := make([]rdma.Op, 256) // more than are outstanding: the host overwrites an operation after its completion
	free := make(chan struct{}, 64)
	for range cap(free) {
		free <- struct{}{}
	}
	p.hosts[0].Hooks.Complete = func(_ *rdma.Op, err error) {
		if err != nil {
			b.Error(err)
		}
		free <- struct{}{}
	}
	n := 0
	post := func() {
		op := &ops[n%len(ops)]
		*op = rdma.Op{Kind: rdma.OpWrite, Key: testKey, Remote: testBase + uint64(n%4*size), Local: data}
		if !p.hosts[0].Post(p.channels[0], op) {
			b.Error("no room")
		}
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	for b.Loop() {
		<-free
		p.hosts[0].Do(post)
		n++
	}
	for range cap(free) {
		<-free
	}
}

// tcpPair returns a TCP connection between namespaces.
func tcpPair(b *testing.B, spaces [2]*netnstest.Namespace, addresses [2]netip.Addr) (from, to net.Conn) {
	b.Helper()
	var l net.Listener
	spaces[1].Must(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addresses[1], Port).String())
		return err
	})
	defer l.Close()
	err := spaces[0].Do(func() (err error) { from, err = net.Dial("tcp", l.Addr().String()); return err })
	if err == nil {
		to, err = l.Accept()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { from.Close(); to.Close() })
	return from, to
}

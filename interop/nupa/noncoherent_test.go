package nupa

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestNonCoherentProcesses joins two namespaces by two processes of fared nupanet --non-coherent. A TCP connection
// carries numbered chunks both ways while each process is killed at a random point and returns; then RoCEv2, SUPERp and
// TCP queue pairs send verified messages through the cable.
func TestNonCoherentProcesses(t *testing.T) {
	gate.Slow(t, gate.Labs, "killed ends of a cable without coherence")
	netnstest.Require(t)
	b := newBed(t)
	tests, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	spaces := [2]*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}
	cable := func(i int) *netnstest.Process {
		p := spaces[i].Start(t, binary.Lab(t), "nupanet", "--non-coherent", "--nupa-file", b.memory.Name(), "--nupa-dead-after", "500ms",
			"--local", fmt.Sprint("192.0.2.", i+1), "--peer", fmt.Sprint("192.0.2.", 2-i))
		netnstest.Eventually(t, time.Minute, func() error {
			if out, err := spaces[i].Output("ip", "addr", "replace", fmt.Sprintf("10.1.0.%d/30", i+1), "dev", "nupanet0"); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return p.Running()
		})
		return p
	}
	ends := [2]*netnstest.Process{cable(0), cable(1)}
	spaces[1].Start(t, "env", partKey+"=serve", tests, "10.1.0.2:4797")
	m := &machine{bed: b, out: b.dir}
	spaces[0].Start(t, "env", partKey+"=fetch", tests, "10.1.0.2:4797", b.dir+"/stream")
	// await waits for so many chunks each way.
	await := func(chunks uint64) {
		t.Helper()
		before := m.streamed()
		netnstest.Eventually(t, time.Minute, func() error {
			if r := m.streamed(); r.Received < before.Received+chunks || r.Sent < before.Sent+chunks {
				return fmt.Errorf("no %d chunks each way after %+v: %+v", chunks, before, r)
			}
			return nil
		})
	}
	await(10)
	for kill := range number(t, killsKey, 2) {
		await(rand.Uint64N(10)) // the moment of the kill
		i := kill % 2
		ends[i].Kill()
		ends[i] = cable(int(i))
		await(10)
	}
	r := m.streamed()
	t.Logf("%d and %d chunks of %d bytes were verified, over %d connections", r.Received, r.Sent, chunkSize, r.Connections)

	size := number(t, bytesKey, 4<<20)
	for _, transport := range []string{"roce", "superp", "tcp"} {
		var nodes [2]*netnstest.Process
		for i, ns := range spaces {
			address := fmt.Sprint("10.1.0.", i+1)
			nodes[i] = ns.Start(t, binary.Lab(t), "traffic", "node", "--transport", transport, "--listen", fmt.Sprintf("unix:%s/node%d", b.dir, i), "--source", address,
				"--slot", "memory=49152@nupanet0", "--slot", "memory=49153@nupanet0")
		}
		args := []string{"traffic", "run", "--size", fmt.Sprint(size), "-o", "json"}
		for i := range nodes {
			args = append(args, "--node", fmt.Sprintf("n%d=unix:%s/node%d", i, b.dir, i))
		}
		netnstest.Eventually(t, time.Minute, func() error {
			for i := range nodes {
				if _, err := os.Stat(fmt.Sprintf("%s/node%d", b.dir, i)); err != nil {
					return err
				}
			}
			return nil
		})
		output, err := spaces[0].Output(binary.Lab(t), args...)
		if err != nil {
			t.Fatalf("%s: %v: %s", transport, err, output)
		}
		t.Log(transport)
		b.verify(string(output), size)
		for _, node := range nodes {
			node.Stop()
		}
	}
}

// TestTwoMachinesNonCoherent boots two virtual machines with a cable through an ivshmem device that flushes their
// caches. RoCEv2 queue pairs exchange verified traffic over the cable, and a TCP connection carries chunks both ways
// all the time: the second machine loses its power and boots once more, then its processes are killed.
func TestTwoMachinesNonCoherent(t *testing.T) {
	gate.Slow(t, gate.VM, "boots two virtual machines")
	b := newBed(t)
	b.flag = "--non-coherent"
	first, second := b.boot(1), b.boot(2)
	one, two := first.order(b.ready()), second.order(b.ready())
	first.succeeded(one())
	second.succeeded(two())
	first.do(partKey + "=fetch $tests 10.1.0.2:4797 $OUT/stream 2>$OUT/stream.log &")
	first.awaitStream(streamReport{})
	b.transfer(first, 4<<20)

	stream := first.streamed()
	second.kill()
	second = b.boot(2)
	second.do(b.ready() + " $server")
	first.awaitStream(stream)
	kills := number(t, killsKey, 1)
	for range kills {
		stream = first.streamed()
		second.do("kill -9 $node $net $server; wait $node $net $server; all; kill -0 $node $net $server")
		first.awaitStream(stream)
	}
	b.transfer(first, number(t, bytesKey, 4<<20))
	stream = first.streamed()
	t.Logf("%d and %d chunks of %d bytes were verified, over %d connections", stream.Received, stream.Sent, chunkSize, stream.Connections)
	if want := uint64(kills) + 2; stream.Connections < want {
		t.Errorf("%d connections, want at least %d", stream.Connections, want)
	}
	t.Log(first.do("ping -c 20 -i 0.1 -s 60000 10.1.0.2"))
}

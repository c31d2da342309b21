package nupa

import (
	"bytes"
	"cmp"
	encoding "encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
)

const (
	// kernelKey is the environment variable with the release of Debian's kernel that the machines run, 6.12 by default.
	kernelKey = "FARED_VM_KERNEL"
	// bytesKey and killsKey are the environment variables with the bytes of the last transfer in each direction, and
	// the number of killed processes.
	bytesKey = "FARED_NUPA_BYTES"
	killsKey = "FARED_NUPA_KILLS"
)

// machineScript runs the scripts that appear as $OUT/order.1 and so on. ivshmem and dax find the memory; start runs a
// traffic node over it, and network a nupanet cable through it, with the second end of a stream on the second machine;
// all does both. With the flag --non-coherent the node is one of RoCEv2 over the cable.
const machineScript = `
number=$1 fared=$2 tests=$3 flag=$4
/run/kernel-vm/bin/busybox ip addr add 192.0.2.$number/24 dev eth0
/run/kernel-vm/bin/busybox ip link set eth0 up
ivshmem() {
  local device
  for device in /sys/bus/pci/devices/*; do
    [ "$(cat $device/vendor)$(cat $device/device)" != 0x1af40x1110 ] || break
  done
  echo 1 >$device/enable
  memory=$device/resource2
}
dax() {
  memory=/dev/dax0.0
  [ -c $memory ] || { ndctl disable-namespace namespace0.0; ndctl enable-namespace namespace0.0; }
  for ((i = 0; i < 100; i++)); do
    [ ! -c $memory ] || return 0
    sleep 0.1
  done
  return 1
}
start() {
  local by="--source 192.0.2.$number --slot memory=49152 --transport nupa --nupa-file $memory --nupa-channels 16 --nupa-dead-after 10s"
  [ -z "$flag" ] || by="--source 10.1.0.$number --slot memory=49152@nupanet0 --transport roce"
  $fared traffic node --listen 192.0.2.$number:4795 $by >$OUT/node.log 2>&1 &
  node=$!
  until grep -q listens $OUT/node.log; do
    kill -0 $node || return
    sleep 0.1
  done
}
network() {
  $fared nupanet $flag --nupa-file $memory --nupa-dead-after 10s --local 198.51.100.$number --peer 198.51.100.$((3 - number)) 2>>$OUT/nupanet.log &
  net=$!
  until ip addr add 10.1.0.$number/24 dev nupanet0 2>/dev/null; do
    kill -0 $net || return
    sleep 0.1
  done
  [ $number = 2 ] || return 0
  FARED_NUPA_PART=serve $tests 10.1.0.2:4797 2>>$OUT/stream.log &
  server=$!
}
/run/kernel-vm/bin/modprobe tun
all() { if [ "$flag" ]; then network; start; else start; network; fi; }
for ((order = 1; ; order++)); do
  until [ -e $OUT/order.$order ]; do sleep 0.1; done
  . $OUT/order.$order >$OUT/output.$order 2>$OUT/errors.$order
  echo $? >$OUT/status
  mv $OUT/status $OUT/status.$order
done
`

func TestMain(m *testing.M) {
	if part := os.Getenv(partKey); part != "" {
		if err := run(part, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// bed is two machines with one memory.
type bed struct {
	t      *testing.T
	dir    string
	memory *os.File
	flag   string // of nupanet
	kind   string // ivshmem or dax
	at     int64  // offset of the memory in its file
}

// machine is a virtual machine.
type machine struct {
	*bed
	number int
	out    string // $OUT
	cmd    *exec.Cmd
	log    bytes.Buffer
	ended  chan struct{}
	orders int
}

func newBed(t *testing.T) *bed {
	t.Helper()
	memory, err := os.CreateTemp("/dev/shm", "fared-nupa-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		memory.Close()
		os.Remove(memory.Name())
	})
	if err := memory.Truncate(64 << 20); err != nil {
		t.Fatal(err)
	}
	return &bed{t: t, dir: t.TempDir(), memory: memory, kind: "ivshmem"}
}

// boot starts a machine; it does not wait for it.
func (b *bed) boot(number int) *machine {
	b.t.Helper()
	out, err := os.MkdirTemp(b.dir, "out")
	if err != nil {
		b.t.Fatal(err)
	}
	tests, err := os.Executable()
	if err != nil {
		b.t.Fatal(err)
	}
	m := &machine{bed: b, number: number, out: out, ended: make(chan struct{})}
	m.cmd = exec.Command("../../scripts/kernel-vm", "-k", cmp.Or(os.Getenv(kernelKey), "6.12"), "-t", "14400", "-m", "1G", "-c", "1", "-o", out,
		map[string]string{"ivshmem": "-i", "dax": "-p"}[b.kind], b.memory.Name(), "-l", fmt.Sprintf("%s/cable:%d", b.dir, number-1),
		"bash", "-c", machineScript, "machine", strconv.Itoa(number), binary.Lab(b.t), tests, b.flag)
	m.cmd.Stdout, m.cmd.Stderr = &m.log, &m.log
	if err := m.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	go func() {
		m.cmd.Wait()
		close(m.ended)
	}()
	b.t.Cleanup(func() {
		m.cmd.Process.Signal(syscall.SIGTERM)
		<-m.ended
		if b.t.Failed() {
			node, _ := os.ReadFile(filepath.Join(out, "node.log"))
			cable, _ := os.ReadFile(filepath.Join(out, "nupanet.log"))
			b.t.Logf("machine %d: %s\nits node: %s\nits nupanet: %s", number, &m.log, node, cable)
		}
	})
	return m
}

// order gives a machine a script; the result waits for its end.
func (m *machine) order(script string) func() (output string, status int) {
	m.t.Helper()
	m.orders++
	n := m.orders
	path := filepath.Join(m.out, "order")
	if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Rename(path, fmt.Sprintf("%s.%d", path, n)); err != nil {
		m.t.Fatal(err)
	}
	return func() (string, int) {
		m.t.Helper()
		for ; ; time.Sleep(50 * time.Millisecond) {
			text, err := os.ReadFile(fmt.Sprintf("%s/status.%d", m.out, n))
			if err == nil {
				status, err := strconv.Atoi(strings.TrimSpace(string(text)))
				if err != nil {
					m.t.Fatal(err)
				}
				output, _ := os.ReadFile(fmt.Sprintf("%s/output.%d", m.out, n))
				return string(output), status
			}
			select {
			case <-m.ended:
				m.t.Fatalf("machine %d has ended during %q", m.number, script)
			default:
			}
		}
	}
}

// do runs a script on a machine, which must succeed.
func (m *machine) do(script string) string {
	m.t.Helper()
	return m.succeeded(m.order(script)())
}

// succeeded requires that the latest script has succeeded, and returns its output.
func (m *machine) succeeded(output string, status int) string {
	m.t.Helper()
	if status != 0 {
		script, _ := os.ReadFile(fmt.Sprintf("%s/order.%d", m.out, m.orders))
		errors, _ := os.ReadFile(fmt.Sprintf("%s/errors.%d", m.out, m.orders))
		m.t.Fatalf("machine %d: %q: status %d: %s%s", m.number, script, status, output, errors)
	}
	return output
}

// kill ends a machine as a loss of power does: it kills its QEMU.
func (m *machine) kill() {
	m.t.Helper()
	qemu := find(m.cmd.Process.Pid)
	if qemu == 0 {
		m.t.Fatal("the machine has no QEMU")
	}
	if err := syscall.Kill(qemu, syscall.SIGKILL); err != nil {
		m.t.Fatal(err)
	}
	<-m.ended
}

// find returns the QEMU among the descendants of a process, or 0.
func find(process int) int {
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", process, process))
	for child := range strings.FieldsSeq(string(children)) {
		pid, err := strconv.Atoi(child)
		if err != nil {
			continue
		}
		if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); strings.HasPrefix(string(name), "qemu-system") {
			return pid
		}
		if found := find(pid); found != 0 {
			return found
		}
	}
	return 0
}

const traffic = "$fared traffic run --node a=192.0.2.1:4795 --node b=192.0.2.2:4795 "

// transfer sends n bytes in each direction and verifies them. The cable between the machines must carry none of them.
func (b *bed) transfer(m *machine, n int64) {
	b.t.Helper()
	carried := func() int64 {
		n, err := strconv.ParseInt(strings.TrimSpace(m.do("cat /sys/class/net/eth0/statistics/tx_bytes")), 10, 64)
		if err != nil {
			b.t.Fatal(err)
		}
		return n
	}
	before := carried()
	b.verify(m.do(traffic+fmt.Sprintf("--size %d -o json", n)), n)
	if wire := carried() - before; wire > n/10 {
		b.t.Errorf("the cable has carried %d bytes of a transfer of %d", wire, n)
	}
}

// verify checks the report of a transfer of n bytes in each direction.
func (b *bed) verify(output string, n int64) {
	b.t.Helper()
	report := new(farev1.TrafficReport)
	if err := protojson.Unmarshal([]byte(output), report); err != nil {
		b.t.Fatal(err)
	}
	total := report.GetTotal()
	if !report.GetOk() || total.GetBytes() < uint64(2*n) || total.GetWrongBytes()+total.GetLost()+total.GetErrors() != 0 {
		b.t.Fatalf("the report: %v", report)
	}
	b.t.Logf("%d bytes verified, goodput %d Mbit/s", total.GetBytes(), total.GetGoodputBps()/1e6)
}

// interrupt calls f in the middle of traffic, and ends the rest of the traffic afterwards.
func (b *bed) interrupt(m *machine, f func()) {
	b.t.Helper()
	m.do(traffic + "--duration 10m >/dev/null 2>&1 & run=$!")
	b.awaitTraffic()
	f()
	m.do("kill -9 $run; wait $run; true")
}

// word reads a number of the memory.
func (b *bed) word(at int64, size int) uint64 {
	b.t.Helper()
	var w [8]byte
	if _, err := b.memory.ReadAt(w[:size], b.at+at); err != nil {
		b.t.Fatal(err)
	}
	return encoding.LittleEndian.Uint64(w[:])
}

// awaitTraffic waits until rings of traffic nodes are in use.
func (b *bed) awaitTraffic() {
	b.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); b.ringsInUse() < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatal("no traffic")
		}
	}
}

// ringsInUse returns the number of rings with a traffic node as the sender, by the offsets in the description of the
// layout (transport/nupa/layout.go).
func (b *bed) ringsInUse() (n int) {
	for i := range int64(b.word(32, 4)) {
		if sender := b.word(4096+64*320+4096*64+i*295040, 4); sender != 0 && !ofCable(b.addressAt(int64(sender)-1)) {
			n++
		}
	}
	return n
}

// addressAt returns the address of a place.
func (b *bed) addressAt(place int64) netip.Addr {
	b.t.Helper()
	var address [16]byte
	if _, err := b.memory.ReadAt(address[:], b.at+4096+place*320+16); err != nil {
		b.t.Fatal(err)
	}
	return netip.AddrFrom16(address).Unmap()
}

// ofCable reports whether an address names an end of the nupanet cable.
func ofCable(a netip.Addr) bool { return netip.MustParsePrefix("198.51.100.0/24").Contains(a) }

// places returns the incarnations of the claimed places by address.
func (b *bed) places() map[string]uint64 {
	out := map[string]uint64{}
	for i := range int64(64) {
		at := 4096 + i*320
		if generation := b.word(at, 8); generation%2 == 1 {
			out[b.addressAt(i).String()] = generation
		}
	}
	return out
}

func number(t *testing.T, key string, or int64) int64 {
	n, err := strconv.ParseInt(cmp.Or(os.Getenv(key), strconv.FormatInt(or, 10)), 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return n
}

// TestTwoMachines boots two virtual machines that share an ivshmem device.
func TestTwoMachines(t *testing.T) {
	gate.Slow(t, gate.VM, "boots two virtual machines")
	b := newBed(t)
	b.exchange(b.boot(1), b.boot(2))
}

// ready is the script that makes a machine ready.
func (b *bed) ready() string { return b.kind + " && all && kill -0 $node $net" }

// exchange makes two machines ready, and lets them exchange verified traffic; one loses its power in the middle of
// more, and boots once more; then processes on it are killed. After each of these failures all bytes of new traffic are
// right. All the time a TCP connection over a nupanet cable through the same memory carries chunks both ways, whose
// second end is killed each time, too: the first end connects again, and no chunk is wrong or missing.
func (b *bed) exchange(first, second *machine) {
	t := b.t
	both := func(script string) {
		t.Helper()
		one, two := first.order(script), second.order(script)
		first.succeeded(one())
		second.succeeded(two())
	}
	both(b.ready())
	both(partKey + "=count $tests $memory")
	if n := b.word(counterAt, 8); n != 2*increments {
		t.Fatalf("the machines have counted to %d, want %d: their atomic instructions are not atomic to each other", n, 2*increments)
	}
	first.do(partKey + "=fetch $tests 10.1.0.2:4797 $OUT/stream 2>$OUT/stream.log &")
	first.awaitStream(streamReport{})
	b.transfer(first, 16<<20)
	before, stream := b.places(), first.streamed()

	b.interrupt(first, func() {
		second.kill()
		second = b.boot(2)
		second.do(b.ready() + " $server")
	})
	b.transfer(first, 16<<20)
	first.awaitStream(stream)
	after := b.places()
	for address, old := range before {
		if restarted := strings.HasSuffix(address, ".2"); restarted != (after[address] > old) || !restarted && after[address] != old {
			t.Errorf("places %v before the second machine restarted, %v after", before, after)
		}
	}

	kills := number(t, killsKey, 1)
	for range kills {
		stream = first.streamed()
		b.interrupt(first, func() {
			second.do("kill -9 $node $net $server; wait $node $net $server; all; kill -0 $node $net $server")
		})
		b.transfer(first, 1<<20)
		first.awaitStream(stream)
	}
	stream = first.streamed()
	b.transfer(first, number(t, bytesKey, 16<<20))
	if now := first.streamed(); now.Received == stream.Received || now.Sent == stream.Sent {
		t.Errorf("the stream over nupanet stood still during the last transfer: %+v", now)
	}
	if n := len(b.places()); n != 4 {
		t.Errorf("%d places are claimed, want two nodes and two ends of a cable", n)
	}
	stream = first.streamed()
	t.Logf("over nupanet %d and %d chunks of %d bytes were verified, over %d connections", stream.Received, stream.Sent, chunkSize, stream.Connections)
	if want := uint64(kills) + 2; stream.Connections < want {
		t.Errorf("%d connections over nupanet, want at least %d", stream.Connections, want)
	}
	t.Log(first.do("ping -c 20 -i 0.1 -s 60000 10.1.0.2"))
}

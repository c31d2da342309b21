package nupa

import (
	"strconv"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestTwoMachinesDAX boots two virtual machines with one NVDIMM, as machines have pooled memory of CXL: a DAX device on
// each. What cannot be shared is refused before it is changed.
func TestTwoMachinesDAX(t *testing.T) {
	gate.Slow(t, gate.VM, "boots two virtual machines")
	b := newBed(t)
	b.kind = "dax"
	const size = 96 << 20
	if err := b.memory.Truncate(size); err != nil {
		t.Fatal(err)
	}
	first, second := b.boot(1), b.boot(2)
	node := func(options string) string {
		return "$fared traffic node --listen 127.0.0.1:4796 --source 192.0.2.3 --slot memory=49152 --transport nupa " + options
	}
	refused := func(command, text string) {
		t.Helper()
		script := "(" + command + ") 2>&1"
		output, status := first.order(script)()
		if status == 0 || !strings.Contains(output, text) {
			t.Errorf("%q: status %d, %q, want %q", script, status, output, text)
		}
	}
	refused(node("--nupa-file /dev/dax0.0"), "/dev/dax0.0: open: no such file or directory: there is no such device")
	refused("[ -e /dev/dax0.0 ]", "")
	refused(node("--nupa-file /dev/pmem0"), "a block device: persistent memory is shared in the mode devdax")
	if b.word(0, 8) != 0 {
		t.Error("a refused node has changed the memory")
	}

	// Map mem: the structures of the kernel for the pages are not in the memory, where those of the other machine would
	// be, too.
	first.do("ndctl create-namespace --force --reconfig=namespace0.0 --mode=devdax --map=mem && dax")
	device, err := strconv.ParseInt(strings.TrimSpace(first.do("cat /sys/bus/dax/devices/dax0.0/size")), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	b.at = size - device
	refused(node("--nupa-file $memory --nupa-channels 1024"), "1024 channels need more than")
	refused("cp $fared /run/fared; fared=/run/fared; setpriv --reuid=65534 --clear-groups "+node("--nupa-file $memory"), "permission denied: its user, group and mode")
	if b.word(0, 8) != 0 {
		t.Error("a refused node has changed the memory")
	}
	b.exchange(first, second)
	if b.word(16, 8) != uint64(device) {
		t.Errorf("the layout has %d bytes, the device %d", b.word(16, 8), device)
	}

	// A second name of the device has other locks.
	before := b.places()
	first.do("mknod /dev/copy c $(stat -c '0x%t 0x%T' /dev/dax0.0) && /run/kernel-vm/bin/busybox ip addr add 192.0.2.3/32 dev lo")
	first.do(node("--nupa-file /dev/copy --nupa-dead-after 10s") + ` >$OUT/copy.log 2>&1 & copy=$!
until grep listens $OUT/copy.log; do
  kill -0 $copy || { cat $OUT/copy.log >&2; break; }
  sleep 0.1
done
kill -0 $copy`)
	after := b.places()
	for address, generation := range before {
		if after[address] != generation {
			t.Errorf("%s has generation %d, %d before a node came by another name of the device", address, after[address], generation)
		}
	}
	if len(after) != len(before)+1 {
		t.Errorf("places %v, before %v", after, before)
	}

	first.do("kill $copy; wait $copy; true")

	// A file of another user, which O_CREAT does not open.
	first.do("sysctl -w fs.protected_regular=2 && touch /dev/shm/theirs && chown 1234 /dev/shm/theirs && chmod 666 /dev/shm/theirs && ! (exec 3<>/dev/shm/theirs)")
	refused(node("--nupa-file /dev/shm/theirs --nupa-size 8192"), "8192 bytes: 256 channels need more than")

	// As docs/transports.md has it.
	first.do(`python3 -c 'import mmap, os, sys; mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 2 << 20)[:8] = bytes(8)' $memory`)
	if w := b.word(0, 8); w != 0 {
		t.Errorf("the first word is %x after zeroing", w)
	}
}

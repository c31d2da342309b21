package tcpqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// Indexes of counts: enum count of the program.
const (
	countWritten = iota
	countNoRoom
	countBatch
	countUnmarked
	countCut
	countEarly
	countReceived
	countForeign
	countLost
	countEnd
)

var countNames = [countEnd]string{
	"options_written", "options_no_room", "options_batched", "options_unmarked", "options_cut", "options_early", "options_received",
	"options_foreign", "segments_lost",
}

// framer owns the framing program on a cgroup.
type framer struct {
	objects framingObjects
	link    link.Link // detaches the program when the link is garbage-collected
	memory  []byte    // mapping of the streams' marks
	size    uintptr   // of one stream
	free    []uint32
	lacking uint64 // number of connections that found no free stream

	mu      sync.Mutex // guards free and lacking: sockets release streams without the device's lock
	reader  *ringbuf.Reader
	readers sync.WaitGroup
}

// newFramer loads the program for a device's sockets and attaches it. The error states the missing requirement and a
// remedy.
func newFramer(c Config, local netip.Addr) (*framer, error) {
	spec, err := loadFraming()
	if err != nil {
		return nil, err
	}
	scope := framingSettings{Family: unix.AF_INET, Port: uint32(c.Port)}
	if local.Is4() {
		a := local.As4()
		scope.Local[0] = binary.NativeEndian.Uint32(a[:])
	} else {
		scope.Family = unix.AF_INET6
		a := local.As16()
		for i := range scope.Local {
			scope.Local[i] = binary.NativeEndian.Uint32(a[4*i:])
		}
	}
	if c.Segments != nil {
		scope.Segments = 1
	}
	if err := spec.Variables[framingVarScope].Set(scope); err != nil {
		return nil, err
	}
	f := &framer{size: unsafe.Sizeof(framingStream{})}
	if err := spec.LoadAndAssign(&f.objects, nil); err != nil {
		return nil, explain(err)
	}
	if err := f.attach(c); err != nil {
		f.close()
		return nil, err
	}
	for i := range uint32(streams) {
		f.free = append(f.free, i)
	}
	return f, nil
}

// explain adds the likely remedy to an error of loading the program.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) && os.Geteuid() != 0:
		return errors.New("tcpqp: the process may not load BPF programs; give it CAP_BPF and CAP_NET_ADMIN")
	case errors.Is(err, unix.ENOSYS):
		return errors.New("tcpqp: the kernel has no bpf system call; it needs CONFIG_BPF_SYSCALL")
	}
	return fmt.Errorf("tcpqp: the kernel refuses a program that writes TCP options (Linux 5.10, CONFIG_CGROUP_BPF): %w", err)
}

func (f *framer) attach(c Config) (err error) {
	f.memory, err = unix.Mmap(f.objects.Streams.FD(), 0, streams*int(f.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("tcpqp: map the streams' marks: %w", err)
	}
	path, done, err := cgroup(c.Cgroup)
	if err != nil {
		return err
	}
	defer done()
	f.link, err = link.AttachCgroup(link.CgroupOptions{Path: path, Attach: ebpf.AttachCGroupSockOps, Program: f.objects.FaredFraming})
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("tcpqp: the process may not attach programs to cgroup %s; give it CAP_NET_ADMIN: %w", path, err)
	} else if err != nil {
		return fmt.Errorf("tcpqp: attach to cgroup %s: %w", path, err)
	}
	if c.Segments == nil {
		return nil
	}
	if f.reader, err = ringbuf.NewReader(f.objects.Arrived); err != nil {
		return fmt.Errorf("tcpqp: %w", err)
	}
	f.readers.Add(1)
	go f.read(c.Segments)
	return nil
}

// cgroup returns the cgroup2 directory to attach to. If none is mounted, as under `ip netns exec`, it mounts one until
// done is called.
func cgroup(path string) (_ string, done func(), err error) {
	if path != "" {
		return path, func() {}, nil
	}
	self, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", nil, fmt.Errorf("tcpqp: %w", err)
	}
	inside := ""
	for line := range strings.Lines(string(self)) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			inside = p
		}
	}
	if inside == "" {
		return "", nil, errors.New("tcpqp: the process is in no cgroup of version 2; the kernel needs CONFIG_CGROUPS")
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", nil, fmt.Errorf("tcpqp: %w", err)
	}
	for line := range strings.Lines(string(mounts)) {
		before, after, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(before); len(fields) > 4 && fields[3] == "/" && strings.HasPrefix(after, "cgroup2 ") {
			return filepath.Join(fields[4], inside), func() {}, nil
		}
	}
	dir, err := os.MkdirTemp("", "fared-cgroup-")
	if err != nil {
		return "", nil, fmt.Errorf("tcpqp: %w", err)
	}
	if err := unix.Mount("none", dir, "cgroup2", 0, ""); err != nil {
		os.Remove(dir)
		return "", nil, fmt.Errorf("tcpqp: cgroup2 is not mounted, and the process may not mount it: mount it, or give the process CAP_SYS_ADMIN: %w", err)
	}
	return filepath.Join(dir, inside), func() {
		unix.Unmount(dir, unix.MNT_DETACH)
		os.Remove(dir)
	}, nil
}

// marker enables the option on a connection's segments from now on. It returns nil if that is impossible.
func (f *framer) marker(s *socket) *marks {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.free) == 0 {
		f.lacking++
		return nil
	}
	stream := f.free[len(f.free)-1]
	m := &marks{segment: s.segmentSize, stream: (*framingStream)(unsafe.Pointer(&f.memory[uintptr(stream)*f.size])), room: optionSpace}
	m.stream.Head = 0
	var known framingFlow
	err := errors.New("no descriptor")
	s.raw.Control(func(fd uintptr) {
		key := int32(fd)
		if err = f.objects.Flows.Lookup(key, &known); err != nil {
			return // the connection started before the program was attached, or belongs to another cgroup
		}
		info, e := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err = e; err != nil {
			return
		}
		if info.Options&1 != 0 { // TCPI_OPT_TIMESTAMPS
			known.Base = 12
			m.room -= 12
		}
		if err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer); err != nil {
			return
		}
		known.Use, known.Stream = 1, stream
		err = f.objects.Flows.Update(key, known, ebpf.UpdateExist)
	})
	if err != nil {
		f.lacking++
		return nil
	}
	f.free = f.free[:len(f.free)-1]
	m.origin = known.Sent
	m.measure()
	s.marks = m
	s.release = func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.free = append(f.free, stream)
	}
	return m
}

// segmentSize returns the maximum payload, in bytes, of a segment without options except the kernel's.
func (s *socket) segmentSize() (n int) {
	s.raw.Control(func(fd uintptr) { n, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) })
	return n
}

// read calls its argument for each received segment.
func (f *framer) read(report func(Segment)) {
	defer f.readers.Done()
	var record ringbuf.Record
	for {
		if err := f.reader.ReadInto(&record); err != nil {
			return // closed: there is no other reason to fail
		}
		if s, ok := segment(record.RawSample); ok {
			report(s)
		}
	}
}

// segment decodes the program's record of a segment.
func segment(p []byte) (s Segment, ok bool) {
	if uintptr(len(p)) < unsafe.Sizeof(framingSegment{}) {
		return s, false
	}
	r := (*framingSegment)(unsafe.Pointer(unsafe.SliceData(p)))
	o, err := ParseOption(r.Option[:])
	if err != nil {
		return s, false
	}
	var a [16]byte
	for i, w := range r.Remote {
		binary.NativeEndian.PutUint32(a[4*i:], w)
	}
	remote := netip.AddrFrom16(a)
	if r.Family == unix.AF_INET {
		remote = netip.AddrFrom4([4]byte(a[:4]))
	}
	return Segment{
		Remote: netip.AddrPortFrom(remote, uint16(r.RemotePort)), Port: uint16(r.LocalPort), Offset: r.Offset, Length: int(r.Length), Option: o,
	}, true
}

// counters adds the program's counters to a map.
func (f *framer) counters(to map[string]uint64) {
	for i, name := range countNames {
		var each []uint64
		if f.objects.Counts.Lookup(uint32(i), &each) == nil {
			for _, n := range each {
				to[name] += n
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	to["option_streams_lacking"] = f.lacking
}

func (f *framer) close() {
	if f.reader != nil {
		f.reader.Close()
		f.readers.Wait()
	}
	if f.link != nil {
		f.link.Close()
	}
	if f.memory != nil {
		unix.Munmap(f.memory)
	}
	f.objects.Close()
}

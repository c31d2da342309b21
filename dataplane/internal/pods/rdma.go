package pods

import (
	"log/slog"
	"net/netip"
	"reflect"
	"time"

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/slotfile"
)

// Pauses between scans for RDMA devices: the kernel makes GIDs some time after addresses, and later ones are rare. A
// scan of 16 devices reads 4,096 files.
const (
	scanFirst = time.Second
	scanMost  = 64 * time.Second
)

// scanner reads the RDMA devices that the processes of a namespace see: all of the host in netns mode shared, those
// that were moved to the namespace in mode exclusive.
type scanner struct {
	log   *slog.Logger
	wake  chan struct{} // is notified of found
	found chan []rdmadev.Port
	again chan struct{} // starts with short pauses
	stop  chan struct{}
}

// newScanner starts scans, until close.
func newScanner(space netns.Namespace, wake chan struct{}, log *slog.Logger) *scanner {
	s := &scanner{log: log, wake: wake, found: make(chan []rdmadev.Port, 1), again: make(chan struct{}, 1), stop: make(chan struct{})}
	sysfs, err := space.Sysfs()
	if err != nil {
		log.Warn("the slot table of a pod names no RDMA devices", "error", err)
		return s
	}
	go s.run(sysfs)
	return s
}

// close ends the scans without waiting for one in progress. The mount does not keep the namespace alive.
func (s *scanner) close() { close(s.stop) }

func (s *scanner) run(sysfs *netns.Sysfs) {
	defer sysfs.Close()
	var last []rdmadev.Port
	for pause := scanFirst; ; pause = min(2*pause, scanMost) {
		ports, err := rdmadev.Scan(sysfs.Root())
		if err != nil {
			s.log.Debug("the RDMA devices of a pod cannot be listed", "error", err)
		}
		if !reflect.DeepEqual(ports, last) {
			select {
			case <-s.found:
			default:
			}
			s.found <- ports
			last = ports
			ring(s.wake)
		}
		select {
		case <-s.stop:
			return
		case <-s.again:
			pause = scanFirst / 2
		case <-time.After(pause):
		}
	}
}

// setRDMA writes the RDMA devices of all sub-ports.
func (t *table) setRDMA() {
	var sources []netip.Addr
	for i := range t.groups {
		sources = append(sources, t.groups[i].sources...)
	}
	for device, i := range t.subPorts {
		t.writer.SetRDMA(i, slotfile.RDMAOf(rdmadev.PortOf(t.rdma, device, sources...), device, sources))
	}
}

package prober

import (
	"time"

	"golang.org/x/sys/unix"
)

// devicesAge is the age from which indexes and MTUs of devices are read again, strangeAge that for an index that
// belongs to no sub-port, and for a packet that is larger than an MTU.
const devicesAge, strangeAge = 10 * time.Second, time.Second

// devices knows the sub-ports by the indexes of their devices. It reads them on use.
type devices struct {
	names   []string // of the sub-ports
	read    time.Time
	indexes map[int]int // sub-port by index
	mtu     int         // the largest of the sub-ports
	mtus    []int
}

// refresh reads the devices if the last reading has an age.
func (d *devices) refresh(now time.Time, oldest time.Duration) {
	if age := now.Sub(d.read); age >= 0 && age < oldest {
		return
	}
	d.read, d.indexes, d.mtu, d.mtus = now, map[int]int{}, 0, make([]int, len(d.names))
	fd, err := datagramSocket(unix.AF_INET)
	if err != nil {
		return
	}
	defer closeSocket(fd)
	for i, name := range d.names {
		index, ok := number(fd, unix.SIOCGIFINDEX, name)
		if !ok {
			continue
		}
		d.indexes[index] = i
		if mtu, ok := number(fd, unix.SIOCGIFMTU, name); ok {
			d.mtus[i] = mtu
			d.mtu = max(d.mtu, mtu)
		}
	}
}

// number returns a number of a device.
func number(fd int, request uintptr, name string) (int, bool) {
	q, err := unix.NewIfreq(name)
	if err != nil || !ask(fd, request, q) {
		return 0, false
	}
	return int(q.Uint32()), true
}

// shrunk reports whether no sub-port carries packets of a size, although an earlier reading of the MTUs allowed it.
func (d *devices) shrunk(size int) bool {
	d.refresh(time.Now(), strangeAge)
	return size > d.mtu
}

// at returns the name of a device and its sub-port, -1 if it is none.
func (d *devices) at(now time.Time, index int) (string, int) {
	for _, oldest := range []time.Duration{devicesAge, strangeAge} {
		d.refresh(now, oldest)
		if i, ok := d.indexes[index]; ok {
			return d.names[i], i
		}
	}
	return nameOf(index), -1
}

// nameOf returns the name of a device, "" if there is none. It asks for this device alone: net.InterfaceByIndex reads
// all devices of the host with all of their attributes.
func nameOf(index int) string {
	fd, err := datagramSocket(unix.AF_INET)
	if err != nil {
		return ""
	}
	defer closeSocket(fd)
	request, err := unix.NewIfreq("-") // the kernel writes the name
	if err != nil {
		return ""
	}
	request.SetUint32(uint32(index))
	if !ask(fd, unix.SIOCGIFNAME, request) {
		return ""
	}
	return request.Name()
}

// indexOf returns the index of a sub-port's device, 0 if there is none.
func (d *devices) indexOf(subPort int) int {
	for index, i := range d.indexes {
		if i == subPort {
			return index
		}
	}
	return 0
}

// left returns the device by which a packet has left toward an expected sub-port: that one if it is among those that
// have carried it, otherwise the last of them; "" if none is known.
func (d *devices) left(now time.Time, indexes []int, expected int) (string, int) {
	for _, oldest := range []time.Duration{devicesAge, strangeAge} {
		d.refresh(now, oldest)
		for _, index := range indexes {
			if i, ok := d.indexes[index]; ok && i == expected {
				return d.names[i], i
			}
		}
	}
	if len(indexes) == 0 {
		return "", -1
	}
	return d.at(now, indexes[len(indexes)-1])
}

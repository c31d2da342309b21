package link

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fared/fared/fare"
)

// ParsePCIe converts the content of sysfs's current_link_speed ("16.0 GT/s PCIe") and current_link_width ("16") to the
// bandwidth of one direction of the link, after line coding (PCI Express Base Specification 6.0, Section 4.2): 8b/10b
// up to 5 GT/s, 128b/130b from 8 to 32 GT/s, and at 64 GT/s flits of 256 bytes, of which 8 are CRC and 6 FEC. (The
// kernel does not subtract those.) Fractions of a bit are dropped. A link that is down ("Unknown", width 0) is an
// error.
func ParsePCIe(speed, width string) (fare.Bandwidth, error) {
	text := strings.TrimSpace(speed)
	number, unit, _ := strings.Cut(text, " ")
	unit, _, _ = strings.Cut(strings.TrimSpace(unit), " ")
	if unit != "GT/s" {
		return 0, fmt.Errorf("PCIe link speed %q: not a number of GT/s; set speed of the sub-port", text)
	}
	var perLane, num, den uint64 = 0, 128, 130
	switch number {
	case "2.5":
		perLane, num, den = 2_500_000_000, 8, 10
	case "5", "5.0":
		perLane, num, den = 5_000_000_000, 8, 10
	case "8", "8.0":
		perLane = 8_000_000_000
	case "16", "16.0":
		perLane = 16_000_000_000
	case "32", "32.0":
		perLane = 32_000_000_000
	case "64", "64.0":
		perLane, num, den = 64_000_000_000, 242, 256
	default:
		return 0, fmt.Errorf("PCIe link speed %q: not the rate of a known generation (2.5, 5, 8, 16, 32, 64 GT/s); set speed of the sub-port", text)
	}
	text = strings.TrimPrefix(strings.TrimSpace(width), "x")
	lanes, err := strconv.ParseUint(text, 10, 8)
	if err != nil || lanes == 0 || lanes > 32 {
		return 0, fmt.Errorf("PCIe link width %q: not 1 to 32 lanes; set speed of the sub-port", strings.TrimSpace(width))
	}
	return fare.Bandwidth(perLane * lanes * num / den), nil
}

// parentDevice returns the sysfs directory of the device below a netdev, or "". It uses the bus in the kernel's
// message, because /sys/class/net shows the devices of only one namespace; it uses /sys/class/net if the message
// contains no bus and the namespace is our own.
func parentDevice(sysfs string, l *linkMessage, own bool) string {
	switch {
	case l.parentBus == "virtio":
		return "" // an emulated device's link does not carry its packets
	case l.parentBus != "" && l.parent != "":
		return filepath.Join(sysfs, "bus", filepath.Base(l.parentBus), "devices", filepath.Base(l.parent))
	case own:
		return filepath.Join(sysfs, "class/net", filepath.Base(l.name), "device")
	}
	return ""
}

// pcieSpeed reads the link of a device, which is a PCI function or is below one: a CXL memory device
// (bus/cxl/devices/mem0), a sub-function. A function without a separate link, such as a virtual function (PCI Express
// Base Specification 6.0, Section 9.3.5), uses the link of the port above it.
func pcieSpeed(sysfs, device string) (fare.Bandwidth, error) {
	dir, err := filepath.EvalSymlinks(device)
	if err != nil {
		return 0, err
	}
	root, err := filepath.EvalSymlinks(sysfs)
	if err != nil {
		return 0, err
	}
	var errs []error
	for ; strings.HasPrefix(dir, root+"/"); dir = filepath.Dir(dir) {
		speed, err := os.ReadFile(filepath.Join(dir, "current_link_speed"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var width []byte
		if err == nil {
			width, err = os.ReadFile(filepath.Join(dir, "current_link_width"))
		}
		if err == nil {
			var b fare.Bandwidth
			if b, err = ParsePCIe(string(speed), string(width)); err == nil {
				return b, nil
			}
		}
		errs = append(errs, fmt.Errorf("%s: %w", dir, err))
	}
	if errs == nil {
		return 0, fmt.Errorf("%s: neither the device nor any of its parents has a PCIe link", device)
	}
	return 0, errors.Join(errs...)
}

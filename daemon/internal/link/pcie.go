package link

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fared/fared/fare"
)

// ParsePCIe turns what sysfs says in current_link_speed ("16.0 GT/s PCIe") and
// current_link_width ("16") into the bandwidth of one direction of the link, after line
// coding, as the kernel computes it: 8b/10b up to 5 GT/s, 128b/130b from 8 to 32 GT/s,
// none at 64 GT/s (PCI Express Base Specification 6.0, Section 4.2). Fractions of a bit
// are dropped. A link that is down ("Unknown", width 0) is an error.
func ParsePCIe(speed, width string) (fare.Bandwidth, error) {
	text := strings.TrimSpace(speed)
	number, unit, _ := strings.Cut(text, " ")
	unit, _, _ = strings.Cut(strings.TrimSpace(unit), " ")
	if unit != "GT/s" {
		return 0, fmt.Errorf("PCIe link speed %q: want a number of GT/s", text)
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
		perLane, num, den = 64_000_000_000, 1, 1
	default:
		return 0, fmt.Errorf("PCIe link speed %q: no such generation (2.5, 5, 8, 16, 32, 64 GT/s); give the sub-port a speed", text)
	}
	text = strings.TrimPrefix(strings.TrimSpace(width), "x")
	lanes, err := strconv.ParseUint(text, 10, 8)
	if err != nil || lanes == 0 || lanes > 32 {
		return 0, fmt.Errorf("PCIe link width %q: want 1 to 32 lanes", strings.TrimSpace(width))
	}
	return fare.Bandwidth(perLane * lanes * num / den), nil
}

// pcieSpeed reads the link of a PCI function, for example "0000:3b:00.0". It goes by the
// bus and not by /sys/class/net, which shows one namespace's devices only.
func pcieSpeed(sysfs, function string) (fare.Bandwidth, error) {
	dir := filepath.Join(sysfs, "bus/pci/devices", filepath.Base(function))
	speed, err := os.ReadFile(filepath.Join(dir, "current_link_speed"))
	if err != nil {
		return 0, err
	}
	width, err := os.ReadFile(filepath.Join(dir, "current_link_width"))
	if err != nil {
		return 0, err
	}
	return ParsePCIe(string(speed), string(width))
}

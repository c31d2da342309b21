package link

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/fare"
)

const (
	sizeofLinkSettings = 48         // struct ethtool_link_settings without its masks
	maskWordsOffset    = 15         // link_mode_masks_nwords in it, signed
	speedUnknown       = 0xffffffff // SPEED_UNKNOWN
)

// ifreq is struct ifreq with a pointer in its union, as SIOCETHTOOL requires.
type ifreq struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [24 - unsafe.Sizeof(uintptr(0))]byte
}

// ethtoolSpeed queries the driver, by a socket of the device's namespace. It returns zero if the driver does not know
// the speed, and an error if the driver does not support the query.
func ethtoolSpeed(fd int, device string) (fare.Bandwidth, error) {
	// <linux/ethtool.h>: the first call returns only the number of words in the
	// masks, as a negative number; the second call returns the settings.
	buf := make([]byte, sizeofLinkSettings+3*4*128)
	for range 2 {
		binary.NativeEndian.PutUint32(buf, unix.ETHTOOL_GLINKSETTINGS)
		if err := ethtool(fd, device, buf); err != nil {
			return 0, fmt.Errorf("ethtool %s: %w", device, err)
		}
		words := int8(buf[maskWordsOffset])
		if words >= 0 {
			mbps := binary.NativeEndian.Uint32(buf[4:])
			if mbps == speedUnknown {
				return 0, nil
			}
			return fare.Bandwidth(mbps) * 1_000_000, nil
		}
		clear(buf)
		buf[maskWordsOffset] = byte(-words)
	}
	return 0, fmt.Errorf("ethtool %s: the driver changes the size of its link mode masks with each call", device)
}

func ethtool(fd int, device string, buf []byte) error {
	var r ifreq
	copy(r.name[:len(r.name)-1], device)
	r.data = unsafe.Pointer(unsafe.SliceData(buf))
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r)))
	runtime.KeepAlive(buf)
	if errno != 0 {
		return errno
	}
	return nil
}

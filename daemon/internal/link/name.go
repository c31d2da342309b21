package link

import (
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Interface returns the device with a name or an alternative name, in the network namespace of the calling thread.
// net.InterfaceByName knows no alternative names.
func Interface(name string) (*net.Interface, error) {
	index, err := indexOf(name)
	if err != nil {
		return nil, err
	}
	return net.InterfaceByIndex(index)
}

// indexOf asks the kernel for the index of a device by any of its names.
func indexOf(name string) (int, error) {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request); err != nil {
		return 0, os.NewSyscallError("SIOCGIFINDEX", err)
	}
	return int(request.Uint32()), nil
}

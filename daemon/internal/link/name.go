package link

import (
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Interface returns the device with a name or an alternative name, in the network namespace of the calling thread. net.InterfaceByName, whose errors it
// returns, knows no alternative names.
func Interface(name string) (*net.Interface, error) {
	found, err := net.InterfaceByName(name)
	if err == nil {
		return found, nil
	}
	if index, other := indexOf(name); other == nil {
		return net.InterfaceByIndex(index)
	}
	return nil, err
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

package netns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Sysfs is a mount of sysfs that shows the devices of one network namespace. No other process sees it.
type Sysfs struct{ mount *os.File }

// Sysfs mounts sysfs for the namespace. It needs CAP_SYS_ADMIN and Linux 5.2.
func (n Namespace) Sysfs() (*Sysfs, error) {
	var mount int
	err := n.Do(func() (err error) {
		mount, err = mountSysfs()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mount sysfs of a network namespace: %w", err)
	}
	return &Sysfs{os.NewFile(uintptr(mount), "sysfs")}, nil
}

func mountSysfs() (int, error) {
	fd, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return 0, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fd)
	if err := unix.FsconfigCreate(fd); err != nil {
		return 0, os.NewSyscallError("fsconfig", err)
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	return mount, os.NewSyscallError("fsmount", err)
}

// Root returns the path of the mount in this process.
func (s *Sysfs) Root() string { return fmt.Sprintf("/proc/self/fd/%d", s.mount.Fd()) }

// Close ends the mount.
func (s *Sysfs) Close() error { return s.mount.Close() }

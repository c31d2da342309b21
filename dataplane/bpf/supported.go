package bpf

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Supported returns nil, or the reason why this host cannot steer by BPF: the kernel, or the privileges of the process.
func Supported() error {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual MIT/GPL",
		// It calls the most recent helper that the steering program needs, apart from TCX.
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, 0), asm.Mov.Imm(asm.R2, 0), asm.Mov.Imm(asm.R3, 0), asm.Mov.Imm(asm.R4, 0),
			asm.FnRedirectNeigh.Call(), asm.Mov.Imm(asm.R0, 0), asm.Return(),
		},
	})
	switch {
	case err == nil:
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) && os.Geteuid() != 0:
		return errors.New("bpf: the process may not load programs; give it CAP_BPF and CAP_NET_ADMIN")
	case errors.Is(err, unix.ENOSYS):
		return errors.New("bpf: the kernel has no bpf system call; it needs CONFIG_BPF_SYSCALL")
	default:
		return fmt.Errorf("bpf: the kernel refuses a program that redirects to a next hop (Linux 5.10, CONFIG_NET_CLS_ACT): %w", err)
	}
	defer program.Close()
	// The device cannot exist, so ENODEV means that the kernel supports TCX.
	l, err := link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: program, Attach: ebpf.AttachTCXEgress})
	switch {
	case err == nil:
		return l.Close()
	case errors.Is(err, unix.ENODEV):
	case errors.Is(err, ebpf.ErrNotSupported):
		return errors.New("bpf: the kernel has no TCX; it needs Linux 6.6 and CONFIG_NET_XGRESS")
	case errors.Is(err, unix.EPERM):
		return errors.New("bpf: the process may not attach programs to devices; give it CAP_NET_ADMIN")
	default:
		return fmt.Errorf("bpf: attach by TCX: %w", err)
	}
	systems, err := os.ReadFile("/proc/filesystems")
	if err == nil && !strings.Contains(string(systems), "\tbpf\n") {
		return errors.New("bpf: the kernel has no BPF file system to pin maps in")
	}
	return nil
}

package speaker

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// aoProgram compiles testdata/ao.c, which shares no code with this package.
func aoProgram(t *testing.T) string {
	t.Helper()
	netnstest.Tools(t, "gcc")
	out := filepath.Join(t.TempDir(), "ao")
	if text, err := exec.CommandContext(t.Context(), "gcc", "-O1", "-Wall", "-Werror", "-o", out, "testdata/ao.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, text)
	}
	return out
}

// aoPeer is the program as one end of a connection; lines is closed when it exits.
type aoPeer struct{ lines chan string }

func newAOPeer(t *testing.T, program string, args ...string) *aoPeer {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &aoPeer{lines: make(chan string, 16)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(p.lines)
		for scanner := bufio.NewScanner(pipe); scanner.Scan(); {
			p.lines <- scanner.Text()
		}
		_ = cmd.Wait() // its output is the result
	}()
	t.Cleanup(func() { <-done })
	return p
}

// kernelAO asks the kernel through the program. It returns the error of setting a key, or nil if the kernel supports
// TCP-AO.
func kernelAO(t *testing.T, program, algorithm string) error {
	t.Helper()
	at := hosts(1)[0].String()
	line := <-newAOPeer(t, program, "connect", at, at, "1", algorithm, "probe", "1", "1").lines
	if code, refused := strings.CutPrefix(line, "no "); refused {
		n, err := strconv.Atoi(code)
		if err != nil {
			t.Fatal(err)
		}
		return syscall.Errno(n)
	}
	if line != "ready" {
		t.Fatalf("the program prints %q", line)
	}
	return nil
}

// withoutAO tests the refusal on a kernel without TCP-AO and reports whether this kernel is one.
func withoutAO(t *testing.T, program string, c Config) bool {
	t.Helper()
	for _, a := range []AOAlgorithm{HMACSHA1, AES128CMAC} {
		want, got := kernelAO(t, program, a.kernel()), CheckAO(a)
		if (want == nil) != (got == nil) {
			t.Fatalf("%s: the kernel answers %v to a C program, CheckAO %v", a.kernel(), want, got)
		}
	}
	if kernelAO(t, program, HMACSHA1.kernel()) == nil {
		return false
	}
	s, err := New(c, testDeps(t))
	const want = `speaker: session "p0": tcp_ao: this kernel has no TCP-AO (needs Linux 6.7 and CONFIG_TCP_AO); use password_file`
	if err == nil || s != nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("New on a kernel without TCP-AO: %v, want %s", err, want)
	}
	return true
}

// TestAOLayout compares the structures with those of a C compiler, octet by octet.
func TestAOLayout(t *testing.T) {
	p := newAOPeer(t, aoProgram(t), "layout")
	mapped := newAOAdd(unix.AF_INET6, netip.MustParseAddr("10.1.2.3"), AO{Key: "0123456789", SendID: 1, ReceiveID: 2, Algorithm: AES128CMAC}, false)
	six := newAOAdd(unix.AF_INET6, netip.MustParseAddr("fd00::9%lo"), AO{ReceiveID: 255, Algorithm: AES128CMAC}, false)
	four := newAOAdd(unix.AF_INET, netip.MustParseAddr("10.1.2.3"), AO{Key: "the key", SendID: 200, ReceiveID: 100}, true)
	for _, v := range []any{&four, &mapped, &six, &tcpAOInfoOpt{Flags: aoRequired}} {
		got, err := binary.Append(nil, binary.NativeEndian, v)
		if err != nil {
			t.Fatal(err)
		}
		if want := <-p.lines; hex.EncodeToString(got) != want {
			t.Errorf("%T\n%x, in C\n%s", v, got, want)
		}
	}
}

// TestAOMissing checks the remedies for the kernel's errors.
func TestAOMissing(t *testing.T) {
	for err, want := range map[error]string{
		unix.ENOPROTOOPT: "use password_file", unix.EINVAL: "use password_file", unix.ENOSYS: "use password_file",
		unix.EOPNOTSUPP: "use password_file", unix.ENOENT: "this kernel has no hmac(sha1)", unix.ENOMEM: "cannot allocate",
	} {
		if got := aoMissing(fmt.Errorf("TCP_AO_ADD_KEY: %w", err), HMACSHA1); got == nil || !strings.Contains(got.Error(), want) {
			t.Errorf("%v: %v, want %q", err, got, want)
		}
	}
	if err := aoMissing(nil, HMACSHA1); err != nil {
		t.Error(err)
	}
}

// TestAO keeps sessions with TCP-AO, TCP MD5 and no signature on one listener; a wrong key, a wrong KeyID or no key
// establishes no session. On a kernel without TCP-AO it tests the refusal.
func TestAO(t *testing.T) {
	server, leaf := pairConfig(t, 7)
	right := AO{Key: "right", SendID: 1, ReceiveID: 2}
	mirror := func(a AO) AO { a.SendID, a.ReceiveID = a.ReceiveID, a.SendID; return a }
	cmac := AO{Key: "not of sixteen octets", SendID: 0, ReceiveID: 255, Algorithm: AES128CMAC}
	wrong, swapped := right, mirror(right)
	wrong.Key = "wrong"
	server.Sessions[0].AO, leaf.Sessions[0].AO = right, mirror(right)
	server.Sessions[1].AO, leaf.Sessions[1].AO = cmac, mirror(cmac)
	server.Sessions[2].Password, leaf.Sessions[2].Password = "right", "right"
	const good = 4 // the third of them, p3, has no signature
	server.Sessions[4].AO, leaf.Sessions[4].AO = right, mirror(wrong)
	server.Sessions[5].AO, leaf.Sessions[5].AO = right, mirror(swapped)
	leaf.Sessions[6].AO = mirror(right)
	if withoutAO(t, aoProgram(t), server) {
		return
	}
	a, _ := startPair(t, server, leaf)
	for i := range server.Sessions {
		if i < good {
			a.until("the session is up", func() bool { return a.state(i).up })
			continue
		}
		a.until("the session has tried in vain", func() bool { return strings.Contains(a.Status(i).Reason, "timeout") })
		if a.state(i).ups != 0 {
			t.Errorf("session %d is up", i)
		}
	}
}

// TestAOWithC connects to a program in C, which reads the kernel's counts of good and bad signatures.
func TestAOWithC(t *testing.T) {
	program := aoProgram(t)
	for _, a := range []AOAlgorithm{HMACSHA1, AES128CMAC} {
		for _, passive := range []bool{false, true} {
			for key, want := range map[string]string{"right": "marker", "wrong": "nothing", "": "nothing"} {
				t.Run(fmt.Sprintf("%s passive=%v key=%q", a.kernel(), passive, key), func(t *testing.T) {
					at := hosts(2)
					c := Config{AS: 65001, RouterID: leafID, Accept: acceptAll, Sessions: []Session{{Name: "p0", Peer: at[1], Local: at[0], Port: uint16(netnstest.FreePort(t)),
						Passive: passive, AO: AO{Key: "right", SendID: 3, ReceiveID: 4, Algorithm: a}}}}
					if withoutAO(t, program, c) {
						return
					}
					r := start(t, create(t, c))
					verb := "listen"
					if passive {
						verb = "connect"
						r.until("listening", func() bool {
							conn, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(netip.AddrPortFrom(at[0], c.Sessions[0].Port)))
							if err == nil {
								conn.Close() // belongs to no session
							}
							return err == nil
						})
					}
					p := newAOPeer(t, program, verb, at[1].String(), at[0].String(), fmt.Sprint(c.Sessions[0].Port), a.kernel(), key, "4", "3")
					var last string
					for line := range p.lines {
						last = line
					}
					if !strings.HasPrefix(last, want) || want == "marker" && (strings.Contains(last, "good=0") || !strings.Contains(last, "bad=0")) {
						t.Errorf("the program ends with %q, want %s", last, want)
					}
				})
			}
		}
	}
}

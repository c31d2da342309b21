package nupa

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A stream is an endless transfer of numbered chunks in each direction of a TCP connection. The first end connects and
// resumes both directions behind the last chunk that has been verified, whatever happens to the other end.
const (
	chunkSize = 64 << 10
	// chunkPause is the time between two chunks of a direction, so that the stream leaves processor time for the other
	// traffic.
	chunkPause = 20 * time.Millisecond
	// chunksAhead is the greatest number of chunks that the first end sends before they are acknowledged.
	chunksAhead = 8
	// streamSilence is the time without a byte after which the first end connects again.
	streamSilence = 10 * time.Second
)

// The kinds of messages from the second end: a chunk; the number of a chunk that was right, and of one that was wrong.
const (
	messageChunk byte = 'D'
	messageRight byte = 'R'
	messageWrong byte = 'W'
)

// streamReport is the state of the first end of a stream.
type streamReport struct {
	// Connections counts the connections that have been made.
	Connections uint64
	// Received and Sent are the numbers of chunks that were verified here, and at the second end.
	Received, Sent uint64
	// Wrong counts chunks with wrong bytes, of either direction.
	Wrong uint64
	// Last is the reason for which the last connection ended.
	Last string
}

// content returns the bytes of a chunk, which depend on its direction and its number.
func content(kind byte, number uint64) []byte {
	seed := [32]byte{kind}
	binary.BigEndian.PutUint64(seed[1:], number)
	b := make([]byte, chunkSize)
	rand.NewChaCha8(seed).Read(b)
	return b
}

// writeChunk writes the number of a chunk, its bytes and their SHA-256.
func writeChunk(w io.Writer, kind byte, number uint64) error {
	b := content(kind, number)
	sum := sha256.Sum256(b)
	_, err := w.Write(append(append(binary.BigEndian.AppendUint64(nil, number), b...), sum[:]...))
	return err
}

// readChunk reads a chunk, whose number must be the given one, and reports whether it is right: the bytes have the sum
// that came with them, and are those of the number.
func readChunk(r io.Reader, kind byte, number uint64) (right bool, err error) {
	b := make([]byte, 8+chunkSize+sha256.Size)
	if _, err := io.ReadFull(r, b); err != nil {
		return false, err
	}
	data, sum := b[8:8+chunkSize], sha256.Sum256(b[8:8+chunkSize])
	return binary.BigEndian.Uint64(b) == number && bytes.Equal(sum[:], b[8+chunkSize:]) && bytes.Equal(data, content(kind, number)), nil
}

// serveStream is the second end: it keeps nothing between connections.
func serveStream(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			fmt.Fprintln(os.Stderr, "the connection has ended:", serveConn(conn))
		}()
	}
}

// bound bounds the chunks that wait in the kernel, behind which acknowledgements would wait, too.
func bound(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = errors.Join(tcp.SetWriteBuffer(2*chunkSize), tcp.SetReadBuffer(2*chunkSize)) // the defaults are right, but slower
	}
}

func serveConn(conn net.Conn) error {
	bound(conn)
	var numbers [2]uint64 // of the first chunk to send, and of the first one to receive
	if err := binary.Read(conn, binary.BigEndian, &numbers); err != nil {
		return err
	}
	var mu sync.Mutex // writes
	ended := make(chan error, 1)
	go func() {
		defer conn.Close()
		r := bufio.NewReaderSize(conn, 2*chunkSize)
		for number := numbers[1]; ; number++ {
			right, err := readChunk(r, messageRight, number)
			if err != nil {
				ended <- err
				return
			}
			answer := messageRight
			if !right {
				answer = messageWrong
			}
			mu.Lock()
			_, err = conn.Write(binary.BigEndian.AppendUint64([]byte{answer}, number))
			mu.Unlock()
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	for number := numbers[0]; ; number++ {
		var message bytes.Buffer
		message.WriteByte(messageChunk)
		if err := writeChunk(&message, messageChunk, number); err != nil {
			return err
		}
		mu.Lock()
		_, err := conn.Write(message.Bytes())
		mu.Unlock()
		if err != nil {
			return errors.Join(err, <-ended)
		}
		time.Sleep(chunkPause)
	}
}

// fetchStream is the first end. It writes its report to a file.
func fetchStream(address, file string) error {
	var report streamReport
	for {
		if err := write(file, report); err != nil {
			return err
		}
		report.Last = fmt.Sprint(fetchConn(address, file, &report))
		fmt.Fprintln(os.Stderr, report.Last)
		time.Sleep(100 * time.Millisecond)
	}
}

func write(file string, report streamReport) error {
	text, err := json.Marshal(report)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func fetchConn(address, file string, report *streamReport) error {
	dialer := net.Dialer{Timeout: 2 * time.Second, Control: func(_, _ string, c syscall.RawConn) (err error) {
		control := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(streamSilence.Milliseconds()))
		})
		return cmp.Or(control, err)
	}}
	conn, err := dialer.Dial("tcp", address)
	if err != nil {
		return err
	}
	bound(conn)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer conn.Close()
	report.Connections++
	if err := binary.Write(conn, binary.BigEndian, [2]uint64{report.Received, report.Sent}); err != nil {
		return err
	}
	var acknowledged atomic.Uint64
	acknowledged.Store(report.Sent)
	ended := make(chan struct{})
	defer close(ended)
	next := report.Sent
	sending.Go(func() {
		for number := next; ; {
			if number < acknowledged.Load()+chunksAhead {
				if writeChunk(conn, messageRight, number) != nil {
					conn.Close() // ends the reader
					return
				}
				number++
			}
			select {
			case <-ended:
				return
			case <-time.After(chunkPause):
			}
		}
	})
	r := bufio.NewReaderSize(conn, 2*chunkSize)
	for reported := time.Now(); ; {
		if time.Since(reported) > 200*time.Millisecond {
			reported = time.Now()
			if err := write(file, *report); err != nil {
				return err
			}
		}
		if err := conn.SetReadDeadline(time.Now().Add(streamSilence)); err != nil {
			return err
		}
		kind, err := r.ReadByte()
		if err != nil {
			return err
		}
		if kind == messageChunk {
			right, err := readChunk(r, messageChunk, report.Received)
			if err != nil {
				return err
			}
			if report.Received++; !right {
				report.Wrong++
			}
			continue
		}
		var number uint64
		if err := binary.Read(r, binary.BigEndian, &number); err != nil {
			return err
		}
		if kind != messageRight || number != report.Sent {
			report.Wrong++
		}
		report.Sent++
		acknowledged.Store(report.Sent)
	}
}

// streamed returns the report of the stream's first end, which this machine runs, and requires that no chunk was wrong.
func (m *machine) streamed() (r streamReport) {
	m.t.Helper()
	text, err := os.ReadFile(filepath.Join(m.out, "stream"))
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		m.t.Fatal(err)
	}
	if r.Wrong > 0 {
		m.t.Fatalf("wrong chunks over nupanet: %+v", r)
	}
	return r
}

// awaitStream waits until the stream has had more connections than so far, and has then carried chunks both ways.
func (m *machine) awaitStream(before streamReport) {
	m.t.Helper()
	const chunks = 50
	await := func(what string, reached func(streamReport) bool) (r streamReport) {
		m.t.Helper()
		for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
			if r = m.streamed(); reached(r) {
				return r
			}
			if time.Now().After(deadline) {
				log, _ := os.ReadFile(filepath.Join(m.out, "stream.log"))
				m.t.Fatalf("over nupanet: no %s: %+v, before %+v\n%s", what, r, before, log)
			}
		}
	}
	connected := await("connection", func(r streamReport) bool { return r.Connections > before.Connections })
	await("chunks", func(r streamReport) bool {
		return r.Received >= connected.Received+chunks && r.Sent >= connected.Sent+chunks
	})
}

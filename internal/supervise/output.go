package supervise

import (
	"bufio"
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// maxLine bounds what is kept of a line until its end comes; a longer one is written in parts.
const maxLine = 64 << 10

// output writes whole lines of several commands to one writer.
type output struct {
	mu      sync.Mutex // guards what follows
	to      io.Writer
	err     error // of the first write that failed
	readers map[*os.File]bool

	reading sync.WaitGroup
}

func newOutput(to io.Writer) *output { return &output{to: to, readers: map[*os.File]bool{}} }

// pipe returns what a command is to write to. Its lines get the name before them. It lasts until nobody has it open.
func (o *output) pipe(name string) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	o.readers[r] = true
	o.mu.Unlock()
	o.reading.Go(func() {
		o.copy(name, r)
		o.mu.Lock()
		delete(o.readers, r)
		o.mu.Unlock()
		r.Close()
	})
	return w, nil
}

func (o *output) copy(name string, r io.Reader) {
	in := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := in.ReadSlice('\n')
		if len(line) > 0 {
			o.line(name, line)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// line writes one line at once. A writer that fails loses lines, and the commands go on.
func (o *output) line(name string, line []byte) {
	text := append(append([]byte(name), ": "...), line...)
	if text[len(text)-1] != '\n' {
		text = append(text, '\n')
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, err := o.to.Write(text); err != nil && o.err == nil {
		o.err = err
	}
}

// close reads what is left. A process that outlived its command and still holds a pipe is not waited for.
func (o *output) close() error {
	o.mu.Lock()
	for r := range o.readers {
		_ = r.SetReadDeadline(time.Now().Add(time.Second))
	}
	o.mu.Unlock()
	o.reading.Wait()
	return o.err
}

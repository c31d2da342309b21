package supervise

import (
	"bufio"
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// maxLine limits the memory of an unfinished line; a longer line is written in parts.
const maxLine = 64 << 10

// output writes whole lines of several commands to one writer.
type output struct {
	mu      sync.Mutex // guards the fields below
	to      io.Writer
	err     error // of the first failed write
	readers map[*os.File]bool

	reading sync.WaitGroup
}

func newOutput(to io.Writer) *output { return &output{to: to, readers: map[*os.File]bool{}} }

// pipe returns the file for a command's output. Its lines are prefixed with the name. The pipe lasts until all its
// holders have closed it.
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

// line writes one line at once. If the writer fails, lines are lost and the commands continue.
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

// close reads the remaining output. It does not wait for a process that outlived its command and still holds a pipe.
func (o *output) close() error {
	o.mu.Lock()
	for r := range o.readers {
		_ = r.SetReadDeadline(time.Now().Add(time.Second))
	}
	o.mu.Unlock()
	o.reading.Wait()
	return o.err
}

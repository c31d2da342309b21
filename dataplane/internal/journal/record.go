package journal

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Kinds of records.
const (
	versionRecord    = 'V'
	forwardingRecord = 'F'
	operationRecord  = 'O'
)

// version is this format's.
const version = "fared journal 1"

// maxRecord bounds what is read: an operation came in a gRPC message of at most 4 MiB.
const maxRecord = 16 << 20

// headerBytes: length of the content and the kind, checksum of that length, checksum of the content and the kind. The
// length has its own, so that a damaged one is not taken for a record that is not whole.
const headerBytes = 12

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errTorn: the file ends within a record.
var errTorn = errors.New("the last record is not whole")

// versionBytes is the record that begins a file.
var versionBytes, _ = appendRecord(nil, versionRecord, nil) // a constant is always encoded

// appendRecord appends a record to b. It fails only for a message that cannot be encoded.
func appendRecord(b []byte, kind byte, message proto.Message) ([]byte, error) {
	begin := len(b)
	b = append(b, make([]byte, headerBytes)...)
	b = append(b, kind)
	if kind == versionRecord {
		b = append(b, version...)
	} else {
		var err error
		if b, err = (proto.MarshalOptions{}).MarshalAppend(b, message); err != nil {
			return b[:begin], err
		}
	}
	header, content := b[begin:begin+headerBytes], b[begin+headerBytes:]
	if len(content) > maxRecord {
		return b[:begin], fmt.Errorf("a record of %d bytes is too long", len(content))
	}
	binary.BigEndian.PutUint32(header, uint32(len(content)))
	binary.BigEndian.PutUint32(header[4:], crc32.Checksum(header[:4], castagnoli))
	binary.BigEndian.PutUint32(header[8:], crc32.Checksum(content, castagnoli))
	return b, nil
}

// readRecord reads the next record; io.EOF is an orderly end, errTorn one within a record.
func readRecord(r io.Reader) ([]byte, error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, errTorn
		}
		return nil, err
	}
	length := binary.BigEndian.Uint32(header[:])
	if binary.BigEndian.Uint32(header[4:]) != crc32.Checksum(header[:4], castagnoli) || length == 0 || length > maxRecord {
		return nil, errors.New("a header is damaged")
	}
	content := make([]byte, length)
	if _, err := io.ReadFull(r, content); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, errTorn
		}
		return nil, err
	}
	if binary.BigEndian.Uint32(header[8:]) != crc32.Checksum(content, castagnoli) {
		return nil, errors.New("a checksum does not match")
	}
	return content, nil
}

// read adds up a file's records. good is how many bytes were whole: all of them, unless err says why not.
func read(r io.Reader) (i image, good int64, err error) {
	i = newImage()
	buffered := bufio.NewReaderSize(r, 64<<10)
	for {
		content, err := readRecord(buffered)
		if errors.Is(err, io.EOF) {
			return i, good, nil
		}
		if err == nil {
			err = i.take(content, good == 0)
		}
		if err != nil {
			return i, good, err
		}
		good += headerBytes + int64(len(content))
	}
}

// take adds a record's content; the first must be the version.
func (i *image) take(content []byte, first bool) error {
	kind, payload := content[0], content[1:]
	switch {
	case first && (kind != versionRecord || string(payload) != version):
		return fmt.Errorf("it is no %q", version)
	case first:
		return nil
	case kind == forwardingRecord:
		var f farev1.Forwarding
		if err := proto.Unmarshal(payload, &f); err != nil {
			return fmt.Errorf("a forwarding is damaged: %w", err)
		}
		i.forward(&f)
		i.forwardingBytes = headerBytes + int64(len(content))
	case kind == operationRecord:
		var o farev1.Operation
		if err := proto.Unmarshal(payload, &o); err != nil {
			return fmt.Errorf("an operation is damaged: %w", err)
		}
		if k, _ := keyOf(&o); k.kind == 0 {
			return errors.New("an operation is of another version")
		}
		if i.forwarding == nil {
			return errors.New("an operation comes before any forwarding")
		}
		i.apply(&o, headerBytes+int64(len(content)))
	default:
		return fmt.Errorf("a record of kind %q is of another version", kind)
	}
	return nil
}

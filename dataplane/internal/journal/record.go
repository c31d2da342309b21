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

// version is the version of this format.
const version = "fared journal 1"

// maxRecord bounds the length of a record: an operation arrives in a gRPC message of at most 4 MiB.
const maxRecord = 16 << 20

// headerBytes is the size of a header: length of content and kind, checksum of that length, checksum of content and
// kind. The length has its own checksum, so that a damaged length is not mistaken for an incomplete record.
const headerBytes = 12

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errTorn reports that the file ends within a record.
var errTorn = errors.New("the last record is incomplete")

// versionBytes is the first record of a file.
var versionBytes, _ = appendRecord(nil, versionRecord, nil) // encoding a constant does not fail

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

// readRecord reads the next record. It returns io.EOF at the end of the file and errTorn if the file ends within a
// record.
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

// read applies all records of a file. good is the length of the valid part in bytes; it is the whole file unless err is
// set.
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

// take applies the content of a record; the first record must be the version.
func (i *image) take(content []byte, first bool) error {
	kind, payload := content[0], content[1:]
	switch {
	case first && (kind != versionRecord || string(payload) != version):
		return fmt.Errorf("the file does not begin with %q", version)
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
			return errors.New("an operation is of an unknown version")
		}
		if i.forwarding == nil {
			return errors.New("an operation precedes the first forwarding")
		}
		i.apply(&o, headerBytes+int64(len(content)))
	default:
		return fmt.Errorf("a record has the unknown kind %q", kind)
	}
	return nil
}

package superp

import (
	"errors"
	"fmt"

	"github.com/fared/fared/transport/rdma"
)

// The major numbers of a Transaction error. The description does not define them; the minor number is 0.
const (
	MajorAccess   = 1 // rdma.ErrRemoteAccess
	MajorInvalid  = 2 // rdma.ErrRemoteInvalid; also for an opcode that the target does not know
	MajorFailed   = 3 // rdma.ErrRemoteOperation; also any number not in this list
	MajorShutdown = 4 // rdma.ErrFlushed: the target has closed the connection and did not execute the operation
)

// ErrShutdown is the error of a connection that the peer or the local Shutdown has ended in an orderly way.
var ErrShutdown = errors.New("connection is shut down")

// ErrTransactionTimeout is the error of a connection with a transaction that was not complete within
// Parameters.TransactionTimeout, and of its incomplete operations.
var ErrTransactionTimeout = fmt.Errorf("%w: transaction timeout", rdma.ErrRetryExceeded)

// ErrShort is the error of a WRITE that SUPERp-lite cannot carry: blocks of data have 16 bytes or more.
var ErrShort = fmt.Errorf("%w: SUPERp-lite carries no WRITE of less than %d bytes", rdma.ErrRemoteInvalid, minBlock)

func majorOf(err error) uint16 {
	switch {
	case errors.Is(err, rdma.ErrRemoteAccess):
		return MajorAccess
	case errors.Is(err, rdma.ErrRemoteInvalid):
		return MajorInvalid
	case errors.Is(err, rdma.ErrFlushed):
		return MajorShutdown
	}
	return MajorFailed
}

func remoteError(major, minor uint16) error {
	err := rdma.ErrRemoteOperation
	switch major {
	case MajorAccess:
		err = rdma.ErrRemoteAccess
	case MajorInvalid:
		err = rdma.ErrRemoteInvalid
	case MajorShutdown:
		err = rdma.ErrFlushed
	}
	return fmt.Errorf("%w (transaction error %d.%d)", err, major, minor)
}

//! Connections in memory that can be stalled, reset, and left behind by a gate that died.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use oncegate::http::socket::ClientStream;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};

/// Called with what is written, once a byte of it has left.
pub type Watch = Box<dyn FnMut(&[u8]) + Send>;

/// One end of a connection. Dropped, the other end reads to the end of what was written.
pub struct Settlement(Shared);

/// The switch of a connection between a gate and somebody else.
#[derive(Clone)]
pub struct Cable {
    gate: Shared,
    other: Shared,
}

type Shared = Arc<Mutex<Side>>;

struct Side {
    stream: Option<DuplexStream>,
    flow: Flow,
    watch: Option<Watch>,
    wakers: Vec<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Open,
    /// Nothing passes for now.
    Stalled,
    /// The connection was reset.
    Reset,
    /// Who had it is dead: nothing happens any more.
    Dead,
}

/// A connection: the gate's end, the other's, and its switch.
pub fn pipe(capacity: usize, watch: Option<Watch>) -> (Settlement, Settlement, Cable) {
    let side = |stream, watch| {
        Arc::new(Mutex::new(Side { stream: Some(stream), flow: Flow::Open, watch, wakers: Vec::new() }))
    };
    let (near, far) = duplex(capacity);
    let (gate, other) = (side(near, watch), side(far, None));
    (Settlement(Arc::clone(&gate)), Settlement(Arc::clone(&other)), Cable { gate, other })
}

impl Cable {
    /// Whether the gate still has its end.
    pub fn is_open(&self) -> bool {
        lock(&self.gate).stream.is_some()
    }

    /// Nothing passes, or everything again.
    pub fn stall(&self, stalled: bool) {
        let mut side = lock(&self.gate);
        match (side.flow, stalled) {
            (Flow::Open, true) => side.flow = Flow::Stalled,
            (Flow::Stalled, false) => side.become_and_wake(Flow::Open),
            _ => {}
        }
    }

    /// Resets the connection for both: what was under way is lost.
    pub fn reset(&self) {
        for side in [&self.gate, &self.other] {
            let stream = {
                let mut side = lock(side);
                if side.flow != Flow::Dead {
                    side.become_and_wake(Flow::Reset);
                }
                side.stream.take()
            };
            // Its drop wakes the other side, which may be polled at once.
            drop(stream);
        }
    }

    /// The gate is gone. What it wrote arrives, and nothing after it.
    pub fn kill(&self) {
        let stream = {
            let mut side = lock(&self.gate);
            side.flow = Flow::Dead;
            side.wakers.clear();
            side.stream.take()
        };
        drop(stream);
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        let mut side = lock(&self.0);
        // Who watches knows the gate, which knows its connections.
        let left = (side.stream.take(), side.watch.take(), std::mem::take(&mut side.wakers));
        drop(side);
        drop(left);
    }
}

impl Side {
    fn become_and_wake(&mut self, flow: Flow) {
        self.flow = flow;
        self.wakers.drain(..).for_each(Waker::wake);
    }

    /// The stream, where something can pass.
    fn stream(&mut self, cx: &Context<'_>) -> Poll<io::Result<Pin<&mut DuplexStream>>> {
        match self.flow {
            Flow::Dead => return Poll::Pending,
            Flow::Reset => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            Flow::Open | Flow::Stalled => {}
        }
        // Whatever happens next, a switch that is turned must be noticed.
        if !self.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            self.wakers.push(cx.waker().clone());
        }
        match (self.flow, self.stream.as_mut()) {
            (Flow::Stalled, _) => Poll::Pending,
            (_, Some(stream)) => Poll::Ready(Ok(Pin::new(stream))),
            (_, None) => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl ClientStream for Settlement {}

impl AsyncRead for Settlement {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match lock(&self.0).stream(cx) {
            Poll::Ready(Ok(stream)) => stream.poll_read(cx, buf),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for Settlement {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let (written, watch) = {
            let mut side = lock(&self.0);
            let written = match side.stream(cx) {
                Poll::Ready(Ok(stream)) => stream.poll_write(cx, buf),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            };
            (written, side.watch.take())
        };
        if let Some(mut watch) = watch {
            if matches!(written, Poll::Ready(Ok(1..))) {
                // Without the lock: it may turn this very switch.
                watch(buf);
            }
            lock(&self.0).watch = Some(watch);
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match lock(&self.0).stream(cx) {
            Poll::Ready(Ok(stream)) => stream.poll_shutdown(cx),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }
}

fn lock(side: &Shared) -> MutexGuard<'_, Side> {
    side.lock().unwrap()
}

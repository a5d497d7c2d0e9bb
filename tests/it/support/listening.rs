//! A thread that takes connections, at an address that nothing else of these tests takes.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Any port of a loopback address of its own, so that no other socket is given that port when it is free again.
pub fn some_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id().wrapping_mul(2_654_435_761).to_be_bytes();
    let nth = NEXT.fetch_add(1, Ordering::SeqCst);
    let last = u8::try_from(1 + nth % 250).expect("below 251");
    (Ipv4Addr::new(127, 1 + process[0] % 250, process[1], last), 0).into()
}

/// Takes connections until it is dropped: whoever connects after that is refused.
pub struct Listening {
    pub address: SocketAddr,
    taken: Arc<AtomicUsize>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listening {
    /// Runs `script` with each connection, and with its number from 1, in a thread of its own.
    pub fn start(address: SocketAddr, script: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).expect("a free address");
        let address = listener.local_addr().expect("a bound socket");
        let (taken, stopped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, ended, script) = (Arc::clone(&taken), Arc::clone(&stopped), Arc::new(script));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(stream) = stream else { continue };
                let nth = counted.fetch_add(1, Ordering::SeqCst) + 1;
                let script = Arc::clone(&script);
                std::thread::spawn(move || script(stream, nth));
            }
        });
        Self { address, taken, stopped, thread: Some(thread) }
    }

    /// How many connections it took.
    pub fn connections(&self) -> usize {
        self.taken.load(Ordering::SeqCst)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Wakes the thread, which then lets go of the address.
        let woken = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        if woken.is_ok()
            && let Some(thread) = self.thread.take()
        {
            // It does not panic; and who drops this may be on the way out of a panic.
            let _ = thread.join();
        }
    }
}

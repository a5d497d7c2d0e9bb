//! A bad wire between a program and its database.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{sleep, spawn};
use std::time::Duration;

use super::process::free_address;

mod frames;

use frames::Frames;

/// A TCP proxy before a PostgreSQL server, or a pooler, that does to its connections what a test says.
pub struct Proxy {
    address: SocketAddr,
    wire: Arc<Wire>,
}

/// Where a connection is cut, once the server has done what it was asked for and has sent all that it has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The client hears nothing of the answer.
    Answer,
    /// The client hears all but the last message, which says that the transaction has ended.
    Ready,
    /// The client hears the answer up to the middle of a message.
    Within,
    /// The server hears the question up to the middle of a message.
    Question,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToClient,
}

struct Wire {
    server: SocketAddr,
    mood: Mutex<Mood>,
    changed: Condvar,
    listens: AtomicBool,
    connections: AtomicUsize,
    cuts: AtomicUsize,
    /// How often all connections were cut; changes under the lock of the mood.
    times_cut: AtomicUsize,
}

/// What the wire does at the moment.
#[derive(Default)]
struct Mood {
    is_over: bool,
    refuses: bool,
    stalls_to_server: bool,
    stalls_to_client: bool,
    delay: Duration,
    /// What happens to the next answer (or question).
    next: Option<Cut>,
    /// How many more bytes go to clients before everything is cut.
    bytes: Option<usize>,
    /// How probable it is that something is cut, and by which numbers that is decided.
    random: Option<(f64, fastrand::Rng)>,
    /// By number: the client's end and the server's.
    open: Vec<(usize, TcpStream, TcpStream)>,
}

impl Proxy {
    /// A wire to this server that is well.
    pub fn before(server: SocketAddr) -> Self {
        let address = free_address();
        let wire = Wire {
            server,
            mood: Mutex::default(),
            changed: Condvar::new(),
            listens: AtomicBool::new(true),
            connections: AtomicUsize::new(0),
            cuts: AtomicUsize::new(0),
            times_cut: AtomicUsize::new(0),
        };
        let wire = Arc::new(wire);
        let listener = TcpListener::bind(address).expect("a free address");
        let accepting = Arc::clone(&wire);
        spawn(move || accepting.accept(address, Some(listener)));
        Self { address, wire }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the same database over this wire.
    pub fn url(&self, direct: &str) -> String {
        super::at(direct, self.address)
    }

    /// From now on everything passes, and what was held back goes on its way.
    pub fn pass(&self) {
        let mut mood = self.wire.mood.lock().unwrap();
        *mood = Mood { open: std::mem::take(&mut mood.open), ..Mood::default() };
        drop(mood);
        self.wire.changed.notify_all();
        self.wait_for_listener(true);
    }

    /// Nobody can connect from now on; what is connected stays.
    pub fn refuse(&self) {
        self.wire.mood.lock().unwrap().refuses = true;
        self.wait_for_listener(false);
    }

    /// Cuts all connections that are open, and those that are accepted and only about to be.
    pub fn cut_all(&self) {
        let mut mood = self.wire.mood.lock().unwrap();
        let open = std::mem::take(&mut mood.open);
        self.wire.times_cut.fetch_add(1, Ordering::SeqCst);
        drop(mood);
        self.wire.cuts.fetch_add(open.len(), Ordering::SeqCst);
        for (_, client, server) in open {
            drop(client.shutdown(Shutdown::Both));
            drop(server.shutdown(Shutdown::Both));
        }
        // Those that are held back see that they are cut.
        self.wire.changed.notify_all();
    }

    /// Holds everything back that goes one way. Connections can still be made.
    pub fn stall(&self, direction: Direction) {
        let mut mood = self.wire.mood.lock().unwrap();
        match direction {
            Direction::ToServer => mood.stalls_to_server = true,
            Direction::ToClient => mood.stalls_to_client = true,
        }
    }

    /// Holds everything back, both ways.
    pub fn stall_all(&self) {
        self.stall(Direction::ToServer);
        self.stall(Direction::ToClient);
    }

    /// Makes everything that much later, each way.
    pub fn delay(&self, time: Duration) {
        self.wire.mood.lock().unwrap().delay = time;
    }

    /// Cuts the connection of the next answer (or question) on whatever connection.
    pub fn cut_next(&self, cut: Cut) {
        self.wire.mood.lock().unwrap().next = Some(cut);
    }

    /// Whether that is still to come.
    pub fn is_cut_to_come(&self) -> bool {
        self.wire.mood.lock().unwrap().next.is_some()
    }

    /// Cuts a connection when this many more bytes have gone to clients.
    pub fn cut_after(&self, bytes: usize) {
        self.wire.mood.lock().unwrap().bytes = Some(bytes);
    }

    /// Cuts at random: each answer, and each question, with this probability, in one of the ways of [`Cut`].
    pub fn cut_at_random(&self, seed: u64, probability: f64) {
        self.wire.mood.lock().unwrap().random = Some((probability, fastrand::Rng::with_seed(seed)));
    }

    /// How many connections were made over it.
    pub fn connections(&self) -> usize {
        self.wire.connections.load(Ordering::SeqCst)
    }

    /// How many of them were cut.
    pub fn cuts(&self) -> usize {
        self.wire.cuts.load(Ordering::SeqCst)
    }

    fn wait_for_listener(&self, listens: bool) {
        for _ in 0..5_000 {
            if self.wire.listens.load(Ordering::SeqCst) == listens {
                return;
            }
            sleep(Duration::from_millis(1));
        }
        panic!("the proxy's listener does not follow");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.wire.mood.lock().unwrap().is_over = true;
        self.cut_all();
    }
}

impl Wire {
    /// Accepts connections while it does not refuse them.
    fn accept(self: Arc<Self>, address: SocketAddr, mut listener: Option<TcpListener>) {
        loop {
            let (is_over, refuses) = {
                let mood = self.mood.lock().unwrap();
                (mood.is_over, mood.refuses)
            };
            if is_over {
                return;
            }
            if refuses {
                listener = None;
            } else if listener.is_none() {
                listener = TcpListener::bind(address).ok();
            }
            self.listens.store(listener.is_some(), Ordering::SeqCst);
            let accepted = listener.as_ref().and_then(|listener| {
                listener.set_nonblocking(true).expect("a socket");
                listener.accept().ok()
            });
            match accepted {
                Some((client, _)) => {
                    client.set_nonblocking(false).expect("a socket");
                    let (wire, times_cut) = (Arc::clone(&self), self.times_cut.load(Ordering::SeqCst));
                    spawn(move || wire.connect(client, times_cut));
                }
                None => sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Connects a client that was accepted when all had been cut this often.
    fn connect(self: Arc<Self>, client: TcpStream, times_cut: usize) {
        let number = self.connections.fetch_add(1, Ordering::SeqCst);
        let Ok(server) = TcpStream::connect(self.server) else { return };
        let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone()) else { return };
        for stream in [&client, &server] {
            stream.set_nodelay(true).expect("a connected socket");
        }
        let both = (number, client.try_clone().expect("a socket"), server.try_clone().expect("a socket"));
        let mut mood = self.mood.lock().unwrap();
        if self.times_cut.load(Ordering::SeqCst) != times_cut {
            self.cuts.fetch_add(1, Ordering::SeqCst);
            return;
        }
        mood.open.push(both);
        drop(mood);
        let frames = Arc::new(Mutex::new(Frames::default()));
        let (wire, seen) = (Arc::clone(&self), Arc::clone(&frames));
        spawn(move || wire.carry(client_too, server_too, Direction::ToServer, &seen));
        self.carry(server, client, Direction::ToClient, &frames);
        self.mood.lock().unwrap().open.retain(|(other, ..)| *other != number);
    }

    /// Carries bytes from one side to the other until it ends or is cut.
    fn carry(&self, mut from: TcpStream, mut to: TcpStream, direction: Direction, frames: &Mutex<Frames>) {
        let mut chunk = [0; 64 * 1024];
        loop {
            let n = match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            if !self.hold_back(direction) {
                break;
            }
            let parts = {
                let mut frames = frames.lock().unwrap();
                match direction {
                    Direction::ToServer => frames.asked(&chunk[..n]),
                    Direction::ToClient => frames.answered(&chunk[..n]),
                }
            };
            if !parts.into_iter().all(|part| self.forward(&mut to, &part, direction)) {
                break;
            }
        }
        drop(from.shutdown(Shutdown::Both));
        drop(to.shutdown(Shutdown::Both));
    }

    /// Waits while the wire stalls, or for its delay. False where the wire is gone.
    fn hold_back(&self, direction: Direction) -> bool {
        let mood = self.mood.lock().unwrap();
        let stalls = |mood: &mut Mood| match direction {
            Direction::ToServer => mood.stalls_to_server && !mood.is_over,
            Direction::ToClient => mood.stalls_to_client && !mood.is_over,
        };
        let mood = self.changed.wait_while(mood, stalls).unwrap();
        let (delay, is_over) = (mood.delay, mood.is_over);
        drop(mood);
        sleep(delay);
        !is_over
    }

    /// Sends a part on, or what is left of it. False where the connection is to be cut.
    fn forward(&self, to: &mut TcpStream, part: &frames::Part, direction: Direction) -> bool {
        let (length, is_cut) = self.passing(part, direction);
        if is_cut {
            self.cuts.fetch_add(1, Ordering::SeqCst);
        }
        to.write_all(&part.bytes[..length]).is_ok() && !is_cut
    }

    /// How much of a part passes, and whether the connection is cut then.
    fn passing(&self, part: &frames::Part, direction: Direction) -> (usize, bool) {
        let whole = part.bytes.len();
        let mut mood = self.mood.lock().unwrap();
        if direction == Direction::ToClient
            && let Some(left) = mood.bytes
        {
            if left <= whole {
                mood.bytes = None;
                return (left, true);
            }
            mood.bytes = Some(left - whole);
        }
        // What is not a whole answer is left alone: the greeting at the start, what comes by itself.
        if direction == Direction::ToClient && part.ready.is_none()
            || direction == Direction::ToServer && !part.is_question
        {
            return (whole, false);
        }
        let fits = |cut: Cut| (cut == Cut::Question) == (direction == Direction::ToServer);
        let mut cut = None;
        if mood.next.is_some_and(fits) {
            cut = mood.next.take();
        } else if let Some((probability, random)) = &mut mood.random
            && random.f64() < *probability
        {
            cut = match direction {
                Direction::ToServer => Some(Cut::Question),
                Direction::ToClient => random.choice([Cut::Answer, Cut::Ready, Cut::Within]),
            };
        }
        match cut {
            None => (whole, false),
            Some(Cut::Answer) => (0, true),
            Some(Cut::Ready) => (part.ready.unwrap_or(whole), true),
            Some(Cut::Within) | Some(Cut::Question) => (whole / 2, true),
        }
    }
}

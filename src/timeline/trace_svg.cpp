// SPDX-License-Identifier: Apache-2.0
// The picture: lanes of workers, what each role takes of all of them over time, rates under their
// ceilings, and the longest waits in words. Rectangles, paths and text, nothing else.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "timeline/segments.hpp"
#include "timeline/timeline.hpp"

namespace uniep {
namespace {

using timeline::Arranged;
using timeline::kFailed;
using timeline::kPlan;
using timeline::kUses;
using timeline::kWait;
using timeline::Segment;
using timeline::Worker;

// Pixels.
constexpr int kLeft = 124, kPlot = 1000, kRight = 116, kWidth = kLeft + kPlot + kRight;
constexpr double kSmallest = 2;  // a bar below shares its column with its neighbours
constexpr int kRateHeight = 56, kUseHeight = 15;
constexpr std::size_t kRateBins = kPlot / 4;
constexpr std::size_t kMostLanes = 128;
constexpr std::size_t kLongestWaits = 5;

// Moving rows is blue, forward products green, data gradients orange, weight gradients purple.
const char* color_of(int use) {
  if (use == kPlan) return "#8a8f98";
  if (use == kWait) return "#b9bec6";
  if (use == kFailed) return "#d62728";
  switch (static_cast<Role>(use)) {
    case Role::send:
      return "#2f6fb5";
    case Role::pull:
      return "#5b9bd5";
    case Role::fanout:
      return "#9cc8ec";
    case Role::gemm1:
      return "#2e8b57";
    case Role::activation:
      return "#b5cf4b";
    case Role::gemm2:
      return "#7cc47f";
    case Role::dgrad2:
      return "#d9722b";
    case Role::d_activation:
      return "#f2d16b";
    case Role::dgrad1:
      return "#f0a45d";
    case Role::wgrad2:
      return "#7d4fa3";
    case Role::wgrad1:
      return "#b48fd0";
    case Role::reduce:
      return "#17a2a8";
    case Role::none:
      break;
  }
  return "#000000";
}

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

// Any bytes, such as those of a file's name, as the text of an XML element.
std::string escaped(const std::string& text) {
  const bool is_text = is_utf8(text);
  std::string out;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80 && !is_text) {
      out += '?';
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    }
  }
  return out;
}

std::string time_text(double ns) {
  if (ns >= 1e9) return fmt::format("{:.3g} s", ns / 1e9);
  if (ns >= 1e6) return fmt::format("{:.3g} ms", ns / 1e6);
  if (ns >= 1e3) return fmt::format("{:.3g} µs", ns / 1e3);
  return fmt::format("{:.0f} ns", ns);
}

std::string percent(double part, double whole) {
  return fmt::format("{:.1f} %", whole > 0 ? 100 * part / whole : 0.0);
}

// Neighbouring workers that are drawn as one.
struct Lane {
  std::string label;
  std::vector<const Worker*> workers;
};

std::string label_of(const Worker& first, const Worker& last, bool has_units, int comm_workers) {
  const auto range = [](const char* one, const char* many, int from, int to) {
    return from == to ? fmt::format("{} {}", one, from) : fmt::format("{} {}–{}", many, from, to);
  };
  if (first.rank != last.rank) return range("rank", "ranks", first.rank, last.rank);
  std::string text = range("worker", "workers", first.worker, last.worker);
  if (has_units && first.worker == last.worker) {
    text += range(", unit", ", units", first.unit, last.unit);
  }
  if (last.worker < comm_workers) text += ", comm";
  return text;
}

std::vector<Lane> lanes_of(const Arranged& all, int comm_workers) {
  std::map<int, std::vector<const Worker*>> by_rank;
  bool has_units = false;
  for (const Worker& worker : all.workers) {
    by_rank[worker.rank].push_back(&worker);
    has_units |= worker.unit > 0;
  }
  std::vector<Lane> lanes;
  const auto add = [&](const std::vector<const Worker*>& workers, std::size_t from,
                       std::size_t to) {
    const auto begin = workers.begin();
    Lane lane{"",
              {begin + static_cast<std::ptrdiff_t>(from), begin + static_cast<std::ptrdiff_t>(to)}};
    lane.label = label_of(*lane.workers.front(), *lane.workers.back(), has_units, comm_workers);
    lanes.push_back(std::move(lane));
  };
  if (by_rank.size() > kMostLanes) {
    const std::size_t ranks_each = (by_rank.size() + kMostLanes - 1) / kMostLanes;
    std::vector<const Worker*> some;
    std::size_t ranks = 0;
    for (const auto& [rank, workers] : by_rank) {
      some.insert(some.end(), workers.begin(), workers.end());
      if (++ranks % ranks_each == 0 || ranks == by_rank.size()) {
        add(some, 0, some.size());
        some.clear();
      }
    }
    return lanes;
  }
  for (const auto& [rank, workers] : by_rank) {
    const std::size_t most = kMostLanes / by_rank.size();
    const std::size_t each = (workers.size() + most - 1) / most;
    for (std::size_t i = 0; i < workers.size(); i += each) {
      add(workers, i, std::min(i + each, workers.size()));
    }
  }
  return lanes;
}

class Picture {
 public:
  Picture(const Trace& trace, const TimelineInfo& info)
      : trace_(trace),
        info_(info),
        all_(timeline::arrange(trace, info.num_ranks, info.workers)),
        lanes_(lanes_of(all_, info.comm_workers)),
        whole_ns_(static_cast<double>(all_.end_ns - all_.start_ns)) {
    for (const Worker& worker : all_.workers) {
      for (std::size_t use = 0; use < kUses; ++use) ns_[use] += static_cast<double>(worker.ns[use]);
    }
    available_ns_ = whole_ns_ * static_cast<double>(all_.workers.size());
  }

  std::string draw() {
    heading();
    legend();
    const double top = y_ + 22;
    y_ = top;
    draw_lanes();
    draw_uses();
    rate("products", "GFLOP/s", &TraceEvent::flops, info_.ceilings.flops_per_s);
    rate("between ranks", "GB/s", &TraceEvent::link_bytes, info_.ceilings.link_bytes_per_s);
    const std::string grid = axis(top - 4, y_ + 2);
    y_ += 22;
    waits();
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1:.0f}\" "
               "viewBox=\"0 0 {0} {1:.0f}\" font-family=\"DejaVu Sans, Helvetica, Arial, "
               "sans-serif\" font-size=\"11\" fill=\"#222\">\n"
               "<title>{2}</title>\n<defs><pattern id=\"hatch\" width=\"4\" height=\"4\" "
               "patternUnits=\"userSpaceOnUse\"><rect width=\"4\" height=\"4\" fill=\"#e4e7eb\"/>"
               "<path d=\"M-1 1l2 -2M0 4l4 -4M3 5l2 -2\" stroke=\"#9aa1ab\"/></pattern></defs>\n"
               "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
               kWidth, y_ + 10, escaped(info_.title)) +
           grid + body_ + "</svg>\n";
  }

 private:
  [[nodiscard]] double x_of(std::int64_t ns) const {
    return kPlot * (static_cast<double>(ns - all_.start_ns) / whole_ns_);
  }

  [[nodiscard]] std::size_t num_ranks() const {
    std::set<int> ranks;
    for (const Worker& worker : all_.workers) ranks.insert(worker.rank);
    return ranks.size();
  }

  void text(double x, double y, const std::string& what, const char* more = "") {
    body_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\"{}>{}</text>\n", x, y, more, escaped(what));
  }

  void heading() {
    text(10, 22, info_.title, " font-size=\"15\" font-weight=\"bold\"");
    text(10, 40,
         fmt::format("{} from the first record to the last, {} workers of {} ranks",
                     time_text(whole_ns_), all_.workers.size(), num_ranks()),
         " fill=\"#555\"");
    y_ = 54;
    if (!info_.schedule.empty()) {
      text(10, y_, info_.schedule, " font-size=\"9\" fill=\"#555\"");
      y_ += 12;
    }
    if (trace_.dropped > 0) {
      text(10, y_ + 2,
           fmt::format("{} older records were not kept: the beginning is incomplete",
                       trace_.dropped),
           " fill=\"#b00\" font-weight=\"bold\"");
      y_ += 16;
    }
  }

  // A colour, a name and a share of all workers' time for each use that occurs.
  void legend() {
    body_ += "<g class=\"legend\">\n";
    double x = 10;
    const auto entry = [&](int use, const std::string& name, double ns) {
      const std::string label = fmt::format("{} {}", name, percent(ns, available_ns_));
      const double width = 26 + 6.8 * static_cast<double>(label.size());
      if (x + width > kWidth - 10) {
        x = 10;
        y_ += 18;
      }
      body_ += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n", x, y_,
          use == kWait ? "url(#hatch)"
          : use < 0    ? "#f3f4f6"
                       : color_of(use));
      text(x + 16, y_ + 10, label);
      x += width;
    };
    double rest = available_ns_;
    for (int use = 0; use < kUses; ++use) {
      const double ns = ns_[static_cast<std::size_t>(use)];
      rest -= ns;
      if (ns > 0) entry(use, timeline::name_of_use(use), ns);
    }
    entry(-1, "unrecorded", std::max(0.0, rest));
    body_ += "</g>\n";
    y_ += 18;
  }

  void draw_lanes() {
    const double height = lanes_.size() <= 16 ? 20 : lanes_.size() <= 48 ? 12 : 7;
    text(kLeft + kPlot + 10, y_ + 6, "busy", " font-size=\"10\" fill=\"#555\"");
    text(kLeft + kPlot + 62, y_ + 6, "waiting", " font-size=\"10\" fill=\"#555\"");
    int rank = -1;
    for (const Lane& lane : lanes_) {
      const Worker& first = *lane.workers.front();
      if (first.rank != rank) {
        rank = first.rank;
        y_ += 10;
        operations(lane);
      }
      draw_lane(lane, height);
      y_ += height + (height > 10 ? 2 : 1);
    }
    y_ += 8;
  }

  // Above a rank's lanes: its name, and how long its operations took.
  void operations(const Lane& lane) {
    const int rank = lane.workers.front()->rank;
    if (rank == lane.workers.back()->rank) {
      text(10, y_ + 3, fmt::format("rank {}", rank), " font-weight=\"bold\"");
    }
    for (const TraceEvent* operation : all_.operations) {
      if (operation->rank != rank) continue;
      const double x = x_of(operation->start_ns), width = x_of(operation->end_ns) - x;
      const char* color = operation->failed != 0 ? color_of(kFailed) : "#555";
      body_ += fmt::format(
          "<path class=\"operation\" d=\"M{:.1f} {:.1f}v-4h{:.1f}v4\" fill=\"none\" "
          "stroke=\"{}\"/>\n",
          kLeft + x, y_ + 5, std::max(width, 1.0), color);
      const std::string label =
          fmt::format("{} {}{}", to_string(operation->pass),
                      time_text(static_cast<double>(operation->end_ns - operation->start_ns)),
                      operation->failed != 0 ? ", failed" : "");
      if (width > 7.0 * static_cast<double>(label.size())) {
        // Over the line, with the background behind it.
        const double middle = kLeft + x + width / 2;
        const double half = 3.2 * static_cast<double>(label.size());
        body_ += fmt::format(
            "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"10\" fill=\"#fff\"/>\n",
            middle - half, y_ - 4, 2 * half);
        text(middle, y_ + 4, label,
             fmt::format(" font-size=\"10\" text-anchor=\"middle\" fill=\"{}\"", color).c_str());
      }
    }
    y_ += 8;
  }

  void draw_lane(const Lane& lane, double height) {
    body_ += "<g class=\"lane\">\n";
    body_ += fmt::format(
        "<rect x=\"{}\" y=\"{:.1f}\" width=\"{}\" height=\"{:.1f}\" fill=\"#e6e8ec\" "
        "fill-opacity=\"0.5\"/>\n",
        kLeft, y_, kPlot, height);
    if (height > 10) {
      text(kLeft - 8, y_ + height / 2 + 4, lane.label, " text-anchor=\"end\"");
    } else {
      text(kLeft - 8, y_ + height - 1, lane.label, " text-anchor=\"end\" font-size=\"7\"");
    }
    draw_bars(lane, height);
    double busy = 0, wait = 0;
    const double available = whole_ns_ * static_cast<double>(lane.workers.size());
    for (const Worker* worker : lane.workers) {
      for (int use = 0; use <= kPlan; ++use) {
        busy += static_cast<double>(worker->ns[static_cast<std::size_t>(use)]);
      }
      for (const Segment& s : worker->segments) {  // failed ones too
        if (s.event->kind == TraceKind::wait) wait += static_cast<double>(s.end_ns - s.start_ns);
      }
    }
    const char* small = height > 10 ? "" : " font-size=\"7\"";
    const double base = height > 10 ? y_ + height / 2 + 4 : y_ + height - 1;
    text(kLeft + kPlot + 10, base, percent(busy, available), small);
    text(kLeft + kPlot + 62, base, percent(wait, available), small);
    body_ += "</g>\n";
  }

  // Bars that are wide enough, each on its own with its description; in every other column what
  // takes most of it, so that the size does not grow with the number of records.
  void draw_bars(const Lane& lane, double height) {
    const bool alone = lane.workers.size() == 1;
    std::vector<std::array<double, kUses>> columns(kPlot);
    std::vector<double> taken(kPlot, 0.0);  // by bars on their own
    for (const Worker* worker : lane.workers) {
      for (const Segment& s : worker->segments) {
        const double from = x_of(s.start_ns), to = x_of(s.end_ns);
        const bool own = alone && to - from >= kSmallest;
        for (auto x = static_cast<std::size_t>(from); x < kPlot && static_cast<double>(x) < to;
             ++x) {
          const auto left = static_cast<double>(x);
          const double part = std::min(to, left + 1) - std::max(from, left);
          (own ? taken[x] : columns[x][static_cast<std::size_t>(s.use)]) += part;
        }
        if (own) bar(s, from, to, height);
      }
    }
    const auto full = static_cast<double>(lane.workers.size());
    std::array<std::string, kUses> paths;
    for (std::size_t x = 0; x < kPlot;) {
      const int use = winner(columns[x], full - taken[x]);
      std::size_t end = x + 1;
      while (end < kPlot && winner(columns[end], full - taken[end]) == use) ++end;
      if (use >= 0) {
        const auto [top, tall] = place(use, height);
        paths[static_cast<std::size_t>(use)] +=
            fmt::format("M{} {:.1f}h{}v{:.1f}h-{}z", kLeft + x, top, end - x, tall, end - x);
      }
      x = end;
    }
    for (int use = 0; use < kUses; ++use) {
      const std::string& path = paths[static_cast<std::size_t>(use)];
      if (path.empty()) continue;
      body_ += fmt::format("<path class=\"{}\" d=\"{}\" fill=\"{}\"/>\n",
                           timeline::name_of_use(use), path, fill_of(use));
    }
  }

  // The use that takes most of a column, or -1 where nothing does.
  static int winner(const std::array<double, kUses>& column, double available) {
    double sum = 0;
    for (const double part : column) sum += part;
    const auto most = std::max_element(column.begin(), column.end());
    return *most > 0 && *most >= available - sum ? static_cast<int>(most - column.begin()) : -1;
  }

  static std::string fill_of(int use) { return use == kWait ? "url(#hatch)" : color_of(use); }

  // Top and height of a bar: waits are thin.
  [[nodiscard]] std::pair<double, double> place(int use, double height) const {
    const double tall = use == kWait ? std::round(height * 0.45) : height;
    return {y_ + (height - tall) / 2, tall};
  }

  void bar(const Segment& s, double from, double to, double height) {
    const auto ns = static_cast<double>(s.end_ns - s.start_ns);
    std::string what = fmt::format("{}; {}", timeline::describe(*s.event), time_text(ns));
    if (s.event->flops > 0) {
      what += fmt::format(", {:.1f} GFLOP/s", static_cast<double>(s.event->flops) / ns);
    }
    const auto [top, tall] = place(s.use, height);
    body_ += fmt::format(
        "<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" "
        "fill=\"{}\"><title>{}</title></rect>\n",
        timeline::name_of_use(s.use), kLeft + from, top, to - from - (to - from > 4 ? 0.6 : 0.2),
        tall, fill_of(s.use), escaped(what));
  }

  // For each use, how many workers are at it over time, each row to its own peak.
  void draw_uses() {
    y_ += 8;
    text(10, y_, "workers at", " font-weight=\"bold\"");
    y_ += 6;
    const std::size_t bins = kPlot / 2;
    const double bin_ns = whole_ns_ / static_cast<double>(bins);
    std::array<std::vector<double>, kUses> parts;
    for (auto& part : parts) part.assign(bins, 0.0);
    for (const Worker& worker : all_.workers) {
      for (const Segment& s : worker.segments) {
        const double from = static_cast<double>(s.start_ns - all_.start_ns) / bin_ns;
        const double to = static_cast<double>(s.end_ns - all_.start_ns) / bin_ns;
        for (auto bin = static_cast<std::size_t>(from); bin < bins; ++bin) {
          const auto left = static_cast<double>(bin);
          if (left >= to) break;
          parts[static_cast<std::size_t>(s.use)][bin] +=
              std::min(to, left + 1) - std::max(from, left);
        }
      }
    }
    text(kLeft + kPlot + 10, y_ - 4, "share", " font-size=\"10\" fill=\"#555\"");
    text(kLeft + kPlot + 62, y_ - 4, "at most", " font-size=\"10\" fill=\"#555\"");
    for (int use = 0; use < kUses; ++use) {
      const double ns = ns_[static_cast<std::size_t>(use)];
      if (ns == 0) continue;
      const std::vector<double>& part = parts[static_cast<std::size_t>(use)];
      const double most = *std::max_element(part.begin(), part.end());
      const double base = y_ + kUseHeight;
      text(kLeft - 8, base - 3, timeline::name_of_use(use), " text-anchor=\"end\"");
      body_ += fmt::format("<path d=\"M{} {:.1f}h{}\" stroke=\"#d5d9de\"/>\n", kLeft, base, kPlot);
      body_ += fmt::format("<path class=\"use\" d=\"{}\" fill=\"{}\"/>\n",
                           steps(part, base, (kUseHeight - 2) / most), color_of(use));
      text(kLeft + kPlot + 10, base - 3, percent(ns, available_ns_));
      text(kLeft + kPlot + 62, base - 3, fmt::format("{:.1f}", most));
      y_ += kUseHeight + 2;
    }
    y_ += 10;
  }

  // The area under values, `scale` pixels a unit, as steps of equal width over the plot.
  static std::string steps(const std::vector<double>& values, double base, double scale) {
    const double width = static_cast<double>(kPlot) / static_cast<double>(values.size());
    std::string path = fmt::format("M{} {:.1f}", kLeft, base);
    double last = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = std::round(values[i] * scale * 10) / 10;
      if (value != last) {
        path += fmt::format("H{:.1f}V{:.1f}", kLeft + static_cast<double>(i) * width, base - value);
      }
      last = value;
    }
    return path + fmt::format("H{}V{:.1f}z", kLeft + kPlot, base);
  }

  // Work over time, `amount` in 1e9 a second, under its ceiling.
  void rate(const char* name, const char* unit, std::int64_t TraceEvent::*amount, double ceiling) {
    const double bin_ns = whole_ns_ / static_cast<double>(kRateBins);
    std::vector<double> rates = timeline::spread(all_, amount, kRateBins);
    double sum = 0, top = ceiling / 1e9;
    for (double& value : rates) {
      sum += value;
      value /= bin_ns;
      top = std::max(top, value);
    }
    if (sum == 0) return;
    const double base = y_ + kRateHeight, scale = (kRateHeight - 14) / top;
    body_ += "<g class=\"rate\">\n";
    text(kLeft - 8, base - kRateHeight / 2.0, name, " text-anchor=\"end\" font-weight=\"bold\"");
    text(kLeft - 8, base - kRateHeight / 2.0 + 14, unit, " text-anchor=\"end\" fill=\"#555\"");
    body_ += fmt::format("<path d=\"M{} {:.1f}h{}\" stroke=\"#d5d9de\"/>\n", kLeft, base, kPlot);
    body_ += fmt::format("<path d=\"{}\" fill=\"#6b7f99\"/>\n", steps(rates, base, scale));
    const double mean = sum / whole_ns_;
    text(kLeft + kPlot + 10, base - 16, fmt::format("mean {:.3g}", mean));
    if (ceiling > 0) {
      const double y = base - ceiling / 1e9 * scale;
      body_ += fmt::format(
          "<path class=\"ceiling\" d=\"M{} {:.1f}h{}\" stroke=\"#b00020\" "
          "stroke-dasharray=\"6 4\"/>\n",
          kLeft, y, kPlot);
      text(kLeft + kPlot + 10, base - 30, fmt::format("ceiling {:.3g}", ceiling / 1e9),
           " fill=\"#b00020\"");
      text(kLeft + kPlot + 10, base - 2, fmt::format("{} of it", percent(mean, ceiling / 1e9)));
      text(kLeft + 4, y - 3, "ceiling: " + info_.ceilings.origin,
           " font-size=\"9\" fill=\"#b00020\"");
    }
    body_ += "</g>\n";
    y_ = base + 14;
  }

  // Lines through all lanes at round times, and their labels at both ends.
  std::string axis(double top, double bottom) {
    double step = std::pow(10, std::floor(std::log10(whole_ns_ / 4)));
    if (whole_ns_ / step > 20) step *= 5;
    if (whole_ns_ / step > 10) step *= 2;
    std::string lines = "<g class=\"axis\" fill=\"#555\" font-size=\"10\">\n";
    for (int i = 0; i * step <= whole_ns_; ++i) {
      const double x = kLeft + kPlot * (i * step / whole_ns_);
      lines += fmt::format("<path d=\"M{0:.1f} {1:.1f}V{2:.1f}\" stroke=\"#e2e5e9\"/>\n", x, top,
                           bottom);
      for (const double y : {top - 4, bottom + 11}) {
        lines += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
                             x, y, i == 0 ? "0" : time_text(i * step));
      }
    }
    return lines + "</g>\n";
  }

  void waits() {
    std::vector<const TraceEvent*> longest;
    std::vector<const TraceEvent*> failed;
    for (const TraceEvent& event : trace_.events) {
      if (event.kind == TraceKind::wait) longest.push_back(&event);
      if (event.kind == TraceKind::task && event.failed != 0) failed.push_back(&event);
    }
    const auto shown = std::min(kLongestWaits, longest.size());
    std::partial_sort(longest.begin(), longest.begin() + static_cast<std::ptrdiff_t>(shown),
                      longest.end(), [](const TraceEvent* a, const TraceEvent* b) {
                        return a->end_ns - a->start_ns > b->end_ns - b->start_ns;
                      });
    longest.resize(shown);
    body_ += "<g class=\"waits\">\n";
    const auto list = [&](const char* title, const std::vector<const TraceEvent*>& events) {
      if (events.empty()) return;
      y_ += 8;
      text(10, y_, title, " font-weight=\"bold\"");
      for (const TraceEvent* event : events) {
        y_ += 15;
        text(10, y_,
             fmt::format("{}: rank {}, worker {}, {}{}, at {}",
                         time_text(static_cast<double>(event->end_ns - event->start_ns)),
                         event->rank, event->worker, timeline::describe(*event),
                         event->failed != 0 ? ", failed" : "",
                         time_text(static_cast<double>(event->start_ns - all_.start_ns))),
             event->failed != 0 ? " fill=\"#b00020\"" : "");
      }
      y_ += 10;
    };
    list("failed tasks", failed);
    list("longest waits", longest);
    body_ += "</g>\n";
  }

  const Trace& trace_;
  const TimelineInfo& info_;
  const Arranged all_;
  const std::vector<Lane> lanes_;
  const double whole_ns_;
  std::array<double, kUses> ns_{};  // of all workers
  double available_ns_ = 0;
  double y_ = 0;
  std::string body_;
};

}  // namespace

std::string trace_svg(const Trace& trace, const TimelineInfo& info) {
  return Picture(trace, info).draw();
}

}  // namespace uniep
